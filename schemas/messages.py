"""The messages of a run. One message is one sample, never a group or a token.

Flow: controller -Prompt-> rollout worker -Rollout-> reward worker -Scored-> controller -Batch-> trainer
-WeightVersion, StepDone-> everybody. Whoever ends a sample without training it writes `Dropped`.

Ids derive from the inputs, so a message that is handled twice writes the same ids twice and the second is dropped.
A `group_id` counts admitted groups from 0; a sample is `(group_id, index)` and its `sample_id` is `"<group>-<index>"`.
A policy version counts optimizer steps: version 0 is the initial model, step i turns version i into i + 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from schemas.base import TYPES as TYPES
from schemas.base import Message as Message
from schemas.base import Sample as Sample
from schemas.base import covers, register, same_length
from schemas.errors import MalformedMessage
from schemas.fields import (
    DoubleArray,
    FloatArray,
    IntArray,
    LongArray,
    Segments,
    array,
    choice,
    data,
    flag,
    integer,
    number,
    numbers,
    segments,
    string,
)
from schemas.ids import oldest_and_newest, parse_sample_id, sample_id
from schemas.trajectory import check_observations, check_sequences, check_spans, check_steps

Finish: TypeAlias = Literal["stop", "length"]
Verdict: TypeAlias = Literal["scored", "timeout", "error", "invalid"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
DropReason: TypeAlias = Literal[
    "zero_variance", "filtered", "stale", "timeout", "error", "invalid", "group_too_small", "bad_prompt", "dead_letter",
    "run_ended",
]  # fmt: skip
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
# What somebody could mend; with the other reasons a sample that worked was left out by intent.
FAILURE_REASONS: frozenset[DropReason] = frozenset({"timeout", "error", "invalid", "bad_prompt", "dead_letter"})
ChatPrompt: TypeAlias = str | list[dict[str, Any]]


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Prompt(Sample):
    """Controller → rollout workers: generate sample `index` of group `group_id`.

    Example: `Prompt(group_id=12, index=3, group_size=8, prompt="2+3=", task={"answer": "5"}, seed=7, min_version=4)`.
    `prompt` is text, or chat messages `[{"role": "user", "content": "..."}]` for the model's chat template.
    `task` is the data row for the reward function. No token of the sample may come from a version below `min_version`.
    """

    TYPE: ClassVar[str] = "prompt"
    group_size: int = integer(1, 1 << 20)
    prompt: ChatPrompt = data()
    task: dict[str, Any] = data()
    seed: int = integer()
    min_version: int = integer()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_prompt(self)

    @property
    def versions(self) -> tuple[int, int] | None:
        """The version asked for."""
        return self.min_version, self.min_version


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Partial(Sample):
    """Rollout worker → rollout workers: the newest known prefix of an unfinished sample.

    `tokens` int32[T], `logprobs` float32[T] of the behaviour policy, `segments` cover T. `worker` made it. `turn` is
    the id of the turn that it answers, empty for a sample without turns.
    """

    TYPE: ClassVar[str] = "partial"
    tokens: IntArray = array("<i4")
    logprobs: FloatArray = array("<f4")
    segments: Segments = segments()
    worker: str = string(200, "")
    turn: str = string(200, "")

    def __post_init__(self) -> None:
        super().__post_init__()
        same_length(self.tokens, self.logprobs, "partial")
        covers(self.segments, len(self.tokens), "partial.segments")

    @property
    def id(self) -> str:
        """A longer prefix is another message."""
        return f"{self.of}/{len(self.tokens)}"

    @property
    def of(self) -> str:
        """The id of the turn, or of the sample, that it is a prefix of."""
        return self.turn or self.sample_id

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest version of its tokens."""
        return oldest_and_newest(self.segments)


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Rollout(Sample):
    """Rollout worker → reward workers, and by sequence → trainer ranks: a finished sample.

    `prompt_tokens` int32[P], `tokens` int32[T], `logprobs` float32[T]: log-probabilities under the behaviour policy,
    the distribution that was really sampled. `segments` cover T. `text` is the decoded response, so that nobody behind
    needs a tokenizer. `seconds` runs from the prompt's arrival to the last token, `resumed` counts the hand-overs.
    An answer that was given up before its budget was used has finish `length`, the reason in `stopped` ("repetition",
    "budget", "predicate") and in `saved` how many tokens it was still allowed.

    A trajectory of several turns: `tokens` holds what the model made and, between its turns, what it was told; the
    latter are `observations`, spans `(start, count)` laid flat in int32[2N], ascending, whose logprobs are 0 and which
    are never trained. Where a turn does not go on from all before it, another sequence begins: `sequences` int32[2K]
    are pairs `(prompt tokens, tokens)` that cut `prompt_tokens` and `tokens` up; empty means one. `messages` is the
    conversation after `prompt` as chat messages. An episode that scored itself sets `reward`, and by step
    `token_rewards` and `step_ends` as in `Scored`. `turns` are the ids of the answers that its tokens are made of, in
    their order; empty for a sample that was no episode.
    """

    TYPE: ClassVar[str] = "rollout"
    group_size: int = integer(1, 1 << 20)
    prompt: ChatPrompt = data()
    task: dict[str, Any] = data()
    prompt_tokens: IntArray = array("<i4")
    tokens: IntArray = array("<i4")
    logprobs: FloatArray = array("<f4")
    segments: Segments = segments()
    finish: Finish = choice("stop", "length")
    text: str = string()
    worker: str = string(200, "")
    seconds: float = number(0.0)
    resumed: int = integer(default=0)
    stopped: str = string(100, "")
    saved: int = integer(default=0)
    observations: IntArray = array("<i4", ())
    sequences: IntArray = array("<i4", ())
    messages: list[dict[str, Any]] = data(())
    turns: list[str] = data(())
    reward: float | None = number(None, optional=True)
    token_rewards: FloatArray = array("<f4", ())
    step_ends: IntArray = array("<i4", ())

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_prompt(self)
        same_length(self.tokens, self.logprobs, "rollout")
        covers(self.segments, len(self.tokens), "rollout.segments")
        check_observations(self.observations, self.logprobs)
        check_sequences(self.sequences, len(self.prompt_tokens), len(self.tokens))
        check_steps("rollout", self.token_rewards, self.step_ends, len(self.tokens), self.reward)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest version of its tokens."""
        return oldest_and_newest(self.segments)


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Scored(Sample):
    """Reward worker → controller: the verdict on the rollout at sequence `rollout_seq` of the rollouts stream.

    It refers to the rollout and does not repeat its tokens. `reward` is None unless the verdict is `scored`: a timeout
    or an error is never a 0. `parts` are named shares of the reward, for logs.

    `token_rewards` float32[T] are process rewards, earned beside `reward`: that of a step at its last token. Those last
    tokens are `step_ends` int32[K], ascending; empty if each token is rewarded by itself. Both are empty without.
    `segments` cover all T tokens of the rollout, of which `observations` are not the model's own.
    `reward_digest` tells which state of the function gave the verdict: that of its source files and options.
    """

    TYPE: ClassVar[str] = "scored"
    group_size: int = integer(1, 1 << 20)
    rollout_seq: int = integer(1)
    prompt_length: int = integer()
    segments: Segments = segments()
    finish: Finish = choice("stop", "length")
    verdict: Verdict = choice("scored", "timeout", "error", "invalid")
    reward: float | None = number(optional=True)
    parts: dict[str, float] = numbers(())
    detail: str = string(4000, "")
    seconds: float = number(0.0)
    worker: str = string(200, "")
    token_rewards: FloatArray = array("<f4", ())
    step_ends: IntArray = array("<i4", ())
    reward_digest: str = string(100, "")
    observations: IntArray = array("<i4", ())

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.reward is None) == (self.verdict == "scored"):
            raise MalformedMessage(f"scored: a verdict {self.verdict} cannot come with the reward {self.reward}")
        check_steps("scored", self.token_rewards, self.step_ends, self.length, self.reward)
        check_spans("scored", self.observations, self.length)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest version of its tokens."""
        return oldest_and_newest(self.segments)

    @property
    def length(self) -> int:
        """Tokens in the response, observations among them."""
        return sum(count for _, count in self.segments)

    @property
    def made(self) -> int:
        """Tokens that the model made."""
        return self.length - int(self.observations[1::2].sum())


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Dropped(Sample):
    """Anybody → controller, people: the terminal record of a sample that will never be trained, and what it cost.

    `worker` gave it up; empty: the controller. One that was held to be dead may give up what another has answered
    meanwhile: then the batch that lists the sample is the last word.
    """

    TYPE: ClassVar[str] = "dropped"
    reason: DropReason = choice(*DROP_REASONS)
    tokens: int = integer(default=0)
    detail: str = string(4000, "")
    worker: str = string(200, "")


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Batch(Message):
    """Controller → every trainer rank: the write-ahead record of optimizer step `step`.

    Parallel arrays of n samples: `group_ids` int64[n], `indices` int32[n], `rollout_seqs` int64[n] (where the tokens
    are), `rewards` float64[n], `lengths` int32[n] (prompt and response tokens, observations among them, by which ranks
    share the work; empty in older logs). A token of version w is trained iff the model made it and `step - w <=
    max_staleness`; every rank derives that mask alike.

    The rest lets a new controller fold the log from here: groups below `next_group` that are not in `live_groups` have
    ended, and nothing before the sequences in `marks` concerns a live group. `dropped` are the samples that this very
    decision ended, as `[sample_id, reason, tokens]`. `seen` are statistics of all samples scored since the last batch.
    `scored_seqs` int64[n] is where the verdicts of samples with process rewards are, 0 for the others; empty if no
    sample has any. `last_scored_s` is when the last verdict on its samples was stored, in Unix seconds, 0 in older
    logs.
    """

    TYPE: ClassVar[str] = "batch"
    step: int = integer()
    max_staleness: int = integer()
    group_ids: LongArray = array("<i8")
    indices: IntArray = array("<i4")
    rollout_seqs: LongArray = array("<i8")
    rewards: DoubleArray = array("<f8")
    next_group: int = integer()
    live_groups: LongArray = array("<i8", ())
    marks: dict[str, float] = numbers(())
    dropped: list[list[str]] = data(())
    seen: dict[str, float] = numbers(())
    lengths: IntArray = array("<i4", ())
    last_scored_s: float = number(0.0)
    scored_seqs: LongArray = array("<i8", ())

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.group_ids) == len(self.indices) == len(self.rollout_seqs) == len(self.rewards):
            raise MalformedMessage("batch: its arrays differ in length")
        for name in ("lengths", "scored_seqs"):
            if len(getattr(self, name)) not in (0, len(self.rewards)):
                raise MalformedMessage(f"batch.{name} must hold a number for each sample, or none")
        if not isinstance(self.dropped, list) or not all(map(_is_dropped, self.dropped)):
            raise MalformedMessage("batch.dropped must be triples [sample_id, reason, tokens]")

    @property
    def id(self) -> str:
        """The step."""
        return str(self.step)

    @property
    def sample_ids(self) -> list[str]:
        """The ids of its samples, in order."""
        return [
            sample_id(group, index) for group, index in zip(self.group_ids.tolist(), self.indices.tolist(), strict=True)
        ]


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class WeightVersion(Message):
    """Trainer rank 0 → everybody: the weights of `version` are at `path`, relative to the run's weight store.

    Example: `WeightVersion(version=6, kind="delta", base=5, path="v000006-77e0c1d4.on000005.delta",
    digest="sha256-…", nbytes=2817, result="sha256-77e0c1d4…")`. `digest` is that of the file's `nbytes` bytes. `base`:
    the version that it stands on, -1 for a full one. `kind` delta: what changed since `base`, and `result` is the
    digest of the full file that comes of both; adapter: a LoRA adapter over the full version `base`. Bytes are written
    first, this event after them.
    """

    TYPE: ClassVar[str] = "weights"
    version: int = integer(0, 1 << 31)
    kind: Literal["full", "delta", "adapter"] = choice("full", "delta", "adapter", default="full")
    base: int = integer(-1, 1 << 31, default=-1)
    path: str = string(1000)
    digest: str = string(200)
    nbytes: int = integer()
    result: str = string(200, "")

    @property
    def result_digest(self) -> str:
        """The digest of what is held in the end: equal ones are the same weights, sent in full or as a delta."""
        return self.result or self.digest

    @property
    def id(self) -> str:
        """The version."""
        return str(self.version)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Itself."""
        return self.version, self.version


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StepDone(Message):
    """Trainer rank 0 → everybody: step `step` is done and made `version`.

    `staleness` int64[k]: how many trained tokens were i versions old. `metrics` by the field's names, times in seconds.
    """

    TYPE: ClassVar[str] = "step"
    step: int = integer()
    version: int = integer()
    metrics: dict[str, float] = numbers()
    staleness: LongArray = array("<i8", ())

    @property
    def id(self) -> str:
        """The step."""
        return str(self.step)


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation(Message):
    """Evaluator → everybody: how `version` did on the held-out problems of `data`, of which there are `count`.

    Example: `Evaluation(version=40, data="task.py:draw", reward=0.75, count=4, verdicts={"scored": 3, "timeout": 1})`.
    `verdicts` count the problems by verdict and sum to `count`. `reward` is the mean over those that were scored, None
    if none was; `parts` are the means of the reward's named shares. `finished` is the share of answers that ended by
    themselves, `response_length` their mean length in tokens. `skipped` int64[k]: versions that were due before it and
    will have no evaluation.
    """

    TYPE: ClassVar[str] = "evaluation"
    version: int = integer(0, 1 << 31)
    data: str = string(1000)
    reward: float | None = number(optional=True)
    parts: dict[str, float] = numbers(())
    count: int = integer(1)
    verdicts: dict[str, float] = numbers()
    finished: float = number(0.0)
    response_length: float = number(0.0)
    greedy: bool = flag(True)
    seconds: float = number(0.0)
    worker: str = string(200, "")
    skipped: LongArray = array("<i8", ())

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.verdicts.keys() <= set(VERDICTS) or sum(self.verdicts.values()) != self.count:
            raise MalformedMessage(f"evaluation.verdicts must count its {self.count} problems, not {self.verdicts}")
        if (self.reward is None) == (self.verdicts.get("scored", 0) > 0):
            raise MalformedMessage("evaluation.reward must be there if, and only if, a problem was scored")

    @property
    def id(self) -> str:
        """A version is evaluated once on each set."""
        return f"{self.version}/{self.data}"

    @property
    def versions(self) -> tuple[int, int] | None:
        """The version that was evaluated."""
        return self.version, self.version


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Control(Message):
    """CLI → everybody. `start` carries the resolved recipe as YAML, so that a node needs only the bus to join.

    `scale` carries `workers`, how many of each role shall run beside the launcher: `{"rollout": 3}`. `reload` has
    reward workers read the file of the reward function anew.
    """

    TYPE: ClassVar[str] = "control"
    action: Literal["start", "pause", "resume", "stop", "scale", "reload"] = choice(
        "start", "pause", "resume", "stop", "scale", "reload"
    )
    nonce: str = string(100)
    recipe: str = string(default="")
    detail: str = string(4000, "")
    workers: dict[str, float] = numbers(())

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.action == "scale") != bool(self.workers):
            raise MalformedMessage("control.workers must be there if, and only if, the action is scale")
        if any(count < 0 or count != int(count) for count in self.workers.values()):
            raise MalformedMessage(f"control.workers must be counts, not {self.workers}")

    @property
    def id(self) -> str:
        """Each control message is its own."""
        return f"{self.action}/{self.nonce}"


def _check_prompt(message: Prompt | Rollout) -> None:
    """The shapes that `data` alone does not check, and that every reader relies on."""
    prompt: Any = message.prompt
    chat = isinstance(prompt, list) and bool(prompt)
    if not isinstance(prompt, str) and not (chat and all(isinstance(turn, dict) and "role" in turn for turn in prompt)):
        raise MalformedMessage(f"{message.TYPE}.prompt must be text, or chat messages with a role each")
    if not isinstance(message.task, dict):
        raise MalformedMessage(f"{message.TYPE}.task must be a map")


def _is_dropped(item: object) -> bool:
    match item:
        case [str(name), str(reason), str(tokens)]:
            return parse_sample_id(name) is not None and reason in DROP_REASONS and tokens.isdecimal()
    return False
