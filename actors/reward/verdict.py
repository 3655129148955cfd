"""What a reward function is asked, and what came of asking it: values, never exceptions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from schemas import Rollout
from schemas.trajectory import last_turn

Status = Literal["scored", "timeout", "error", "invalid"]


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """One finished sample, as a reward function sees it.

    Example: `RewardRequest("g7/0", "What is 2+3?", "5", "stop", {"answer": "5"})`.
    """

    sample_id: str
    prompt: str | Sequence[Mapping[str, Any]]
    """Text, or chat messages `{"role": ..., "content": ...}`."""
    response: str
    """The decoded text of the reply, without special tokens."""
    finish: Literal["stop", "length"]
    """Whether the reply ended by itself or was cut at its token limit."""
    task: Mapping[str, Any]
    """The data row that the prompt came from, with its `answer` and whatever else the row holds."""
    tokens: Sequence[int] | None = None
    """The reply's token ids; of an episode those of all its turns, and what was told between them."""
    messages: Sequence[Mapping[str, Any]] = ()
    """What was said after the prompt, as chat messages; left out, the reply alone."""
    turn: tuple[int, int] | None = None
    """Where in `tokens` the reply is that `response` tells: the first, and one past the last; None: all of them."""

    def __post_init__(self) -> None:
        if not self.messages:
            object.__setattr__(self, "messages", [{"role": "assistant", "content": self.response}])

    @classmethod
    def of(cls, rollout: Rollout) -> "RewardRequest":
        """What is asked about a rollout."""
        several = len(rollout.tokens) and (len(rollout.observations) or len(rollout.sequences))
        return cls(
            rollout.sample_id,
            rollout.prompt,
            rollout.text,
            rollout.finish,
            rollout.task,
            rollout.tokens.tolist(),
            rollout.messages,
            last_turn(rollout.observations, rollout.sequences, len(rollout.tokens)) if several else None,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one request.

    `scored`: the function gave a finite number. `timeout`: it did not answer in time and was killed. `error`: it
    raised, or its process died. `invalid`: it returned something that is no finite number. Only `scored` has a reward;
    the others are never read as 0.

    Example: `Verdict("scored", 1.0, {"format": 0.5}, "", seconds=0.0001, attempts=1)`.
    """

    status: Status
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, for logging; all finite."""
    detail: str = ""
    """One short line for people: what went wrong, or what a function told beside its reward."""
    seconds: float = 0.0
    """Wall seconds that the last attempt's call took."""
    attempts: int = 1
    """Calls made, retries included."""
    token_rewards: tuple[float, ...] = ()
    """Process rewards, one for each token of the reply, in float32; empty without."""
    steps: tuple[tuple[int, float], ...] = ()
    """Rewards of steps, by the characters at which they end, as the function gave them; see `steps`."""
    digest: str = ""
    """Of the function that gave it: its source files and options; see `sources`."""
    step_ends: tuple[int, ...] = ()
    """The tokens at which the steps end that were rewarded; empty if each token is rewarded by itself."""
