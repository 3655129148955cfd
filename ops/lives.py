"""What a log tells about single samples, from admission to the step that trained them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import numpy as np

from actors.trainer.actor import ages_of
from actors.trainer.credit import assign
from actors.trainer.process import verdicts_of
from actors.trainer.samples import TrainSample, train_sample
from bus.port import FROM_HEADER, REASON_HEADER, WAS_HEADER, Entry
from bus.table import BATCHES, DEAD, DROPPED, PARTIALS, PROMPTS, ROLLOUTS, SCORED, STEPS, WEIGHTS, Stream
from ops.log_source import LogSource
from ops.recipe import Recipe
from schemas import (
    Batch,
    Dropped,
    MalformedMessage,
    Partial,
    Prompt,
    Rollout,
    Scored,
    StepDone,
    UserError,
    WeightVersion,
    parse_sample_id,
    sample_id,
)
from schemas.trajectory import model_segments

Sample = tuple[int, int]  # group id, index
GET_WINDOW = 64


@dataclasses.dataclass(slots=True)
class Training:
    """The step that trained a sample. `staleness` is that of its segments, in order; `masked` tokens were too old.

    `advantages` are those of its trained tokens, None if more than the batch decides on them. `group_rewards` are those
    of the samples of its group in the batch.
    """

    step: int
    version: int
    max_staleness: int
    reward: float
    advantages: list[float] | None
    group_rewards: list[float]
    staleness: list[int]
    masked: int
    batched_s: float
    trained_s: float | None = None


@dataclasses.dataclass(slots=True)
class Life:
    """One sample. What the log does not hold is None; times are the broker's, Unix seconds."""

    group_id: int
    index: int
    prompt: Prompt | None = None
    admitted_s: float | None = None
    partial: Partial | None = None
    partial_s: float | None = None
    rollout: Rollout | None = None
    rollout_seq: int | None = None
    rollout_s: float | None = None
    scored: Scored | None = None
    scored_s: float | None = None
    training: Training | None = None
    dropped: Dropped | None = None
    dropped_s: float | None = None
    dead_letters: list[str] = dataclasses.field(default_factory=list)
    again: list[str] = dataclasses.field(default_factory=list)  # messages of it that came a second time

    @property
    def id(self) -> str:
        """`12-3`."""
        return sample_id(self.group_id, self.index)

    @property
    def fate(self) -> str:
        """How it ended, in a few words."""
        if self.training is not None:
            trained = self.training.trained_s is not None
            return f"{'trained in' if trained else 'in the batch of'} step {self.training.step}"
        if self.dropped is not None:
            return f"dropped: {self.dropped.reason}"
        if self.scored is not None:
            return "waits for a batch"
        return "waits for its score" if self.rollout is not None else "waits for its answer"


async def read_lives(
    source: LogSource, recipe_of_step: Callable[[int], Recipe], wanted: Iterable[Sample]
) -> dict[Sample, Life]:
    """The lives of some samples, by `(group_id, index)`, each stream read once. Unknown samples are left out.

    `recipe_of_step(step)` is the recipe by which a step was trained.
    """
    lives = {sample: Life(*sample) for sample in sorted(wanted)}
    async for life, entry in _of(source, DROPPED, lives):
        with contextlib.suppress(MalformedMessage):
            message = entry.message()
            if isinstance(message, Dropped) and _first(life, life.dropped, entry):
                life.dropped, life.dropped_s = message, entry.time_s
    await _read_batches(source, lives, recipe_of_step)
    async for life, entry in _of(source, SCORED, lives):
        with contextlib.suppress(MalformedMessage):
            message = entry.message()
            if isinstance(message, Scored) and _first(life, life.scored, entry):
                life.scored, life.scored_s = message, entry.time_s
                life.rollout_seq = life.rollout_seq or message.rollout_seq
    async for life, entry in _of(source, PARTIALS, lives):
        with contextlib.suppress(MalformedMessage):
            message = entry.message()
            if isinstance(message, Partial):
                life.partial, life.partial_s = message, entry.time_s
    await _read_rollouts(source, lives)
    await _read_prompts(source, lives)
    await _read_dead(source, lives)
    return {sample: life for sample, life in lives.items() if life.prompt is not None or life.rollout is not None}


async def _of(source: LogSource, stream: Stream, lives: dict[Sample, Life]) -> AsyncIterator[tuple[Life, Entry]]:
    """The entries of a stream that concern the samples, told by their headers."""
    async for entry in source.read(stream):
        sample = entry.sample
        if sample is not None and sample in lives:
            yield lives[sample], entry


def _first(life: Life, known: object | None, entry: Entry) -> bool:
    if known is not None:
        life.again.append(f"{entry.stream.name} {entry.seq}")
    return known is None


async def _read_batches(source: LogSource, lives: dict[Sample, Life], recipe_of_step: Callable[[int], Recipe]) -> None:
    groups = np.array(sorted({group for group, _ in lives}), np.int64)
    async for entry in source.read(BATCHES):
        batch = entry.message()
        assert isinstance(batch, Batch)
        for triple in batch.dropped:
            sample = parse_sample_id(triple[0])
            if sample in lives and lives[sample].dropped is None:
                life = lives[sample]
                life.dropped, life.dropped_s = _dropped_by(batch, life, triple), entry.time_s
        here = np.flatnonzero(np.isin(batch.group_ids, groups)).tolist()
        ids = list(zip(batch.group_ids.tolist(), batch.indices.tolist(), strict=True))
        trained = [(place, lives[ids[place]]) for place in here if ids[place] in lives]
        if not trained:
            continue
        advantages = await _advantages(source, batch, recipe_of_step(batch.step))
        trained_s = await _time_of_step(source, batch.step)
        for place, life in trained:
            life.rollout_seq = int(batch.rollout_seqs[place])
            life.training = Training(
                step=batch.step,
                version=batch.step + 1,
                max_staleness=batch.max_staleness,
                reward=float(batch.rewards[place]),
                advantages=advantages.get(ids[place], []) if advantages is not None else None,
                group_rewards=batch.rewards[batch.group_ids == life.group_id].tolist(),
                staleness=[],
                masked=0,
                batched_s=entry.time_s,
                trained_s=trained_s,
            )


async def _advantages(source: LogSource, batch: Batch, recipe: Recipe) -> dict[Sample, list[float]] | None:
    """The advantages of a batch, as the trainer assigns them to tokens; None if a critic, a reference model or a
    function of the user's has a say, or if a rollout is missing."""
    config = recipe.trainer
    if config.critic is not None or config.kl.coef or config.advantage.function is not None:
        return None
    samples: dict[Sample, TrainSample] = {}
    try:
        entries = await source.get(ROLLOUTS, batch.rollout_seqs.tolist())
        verdicts = await verdicts_of(source, batch, np.arange(len(entries)))
        for entry, reward, scored in zip(entries, batch.rewards.tolist(), verdicts, strict=True):
            rollout = entry.message()
            if isinstance(rollout, Rollout) and len(rollout.tokens):
                age = ages_of(rollout.segments, batch.step)
                fresh = age <= batch.max_staleness
                sample = train_sample(rollout, fresh, batch.step - age, reward, scored)
                samples[rollout.group_id, rollout.index] = sample
    except (LookupError, MalformedMessage, UserError):
        return None
    ordered = sorted(samples.items(), key=lambda item: (item[1].group_id, item[1].sample_id))
    credit = assign([sample for _, sample in ordered], config, max_new_tokens=recipe.rollout.max_new_tokens)
    return {name: tokens.tolist() for (name, _), tokens in zip(ordered, credit.advantages, strict=True)}


def _dropped_by(batch: Batch, life: Life, triple: list[str]) -> Dropped:
    reason, tokens = triple[1], int(triple[2])
    detail = f"decided with batch {batch.step}"
    fields = {"group_id": life.group_id, "index": life.index, "reason": reason, "tokens": tokens, "detail": detail}
    return Dropped.unpacked(fields)


async def _time_of_step(source: LogSource, step: int) -> float | None:
    """When the weights that a step made were announced."""
    with contextlib.suppress(LookupError):
        (entry,) = await source.get(WEIGHTS, [step + 2])  # version v stands at sequence v + 1
        message = entry.message()
        if isinstance(message, WeightVersion) and message.version == step + 1:
            return entry.time_s
    with contextlib.suppress(LookupError):
        (entry,) = await source.get(STEPS, [step + 1])
        if isinstance(entry.message(), StepDone):
            return entry.time_s
    return None


async def _at(source: LogSource, stream: Stream, seqs: Sequence[int]) -> AsyncIterator[Entry]:
    """The entries at these sequences, as many at a time as memory bears; none of a window in which one is missing."""
    for at in range(0, len(seqs), GET_WINDOW):
        with contextlib.suppress(LookupError):
            for entry in await source.get(stream, seqs[at : at + GET_WINDOW]):
                yield entry


async def _read_rollouts(source: LogSource, lives: dict[Sample, Life]) -> None:
    by_seq = {life.rollout_seq: life for life in lives.values() if life.rollout_seq is not None}
    async for entry in _at(source, ROLLOUTS, sorted(by_seq)):
        _take_rollout(by_seq[entry.seq], entry)
    missing = {sample: life for sample, life in lives.items() if life.rollout is None}
    if missing:
        async for life, entry in _of(source, ROLLOUTS, missing):
            if _first(life, life.rollout, entry):
                _take_rollout(life, entry)


def _take_rollout(life: Life, entry: Entry) -> None:
    with contextlib.suppress(MalformedMessage):
        rollout = entry.message()
        if not isinstance(rollout, Rollout) or (rollout.group_id, rollout.index) != (life.group_id, life.index):
            return
        life.rollout, life.rollout_seq, life.rollout_s = rollout, entry.seq, entry.time_s
        if life.training is not None:
            step, bound = life.training.step, life.training.max_staleness
            life.training.staleness = [step - version for version, _ in rollout.segments]
            made = model_segments(rollout.segments, rollout.observations)
            life.training.masked = sum(count for version, count in made if step - version > bound)


async def _read_prompts(source: LogSource, lives: dict[Sample, Life]) -> None:
    """Groups are admitted one after the other, so a prompt's place follows from the group's size; else we look."""
    sizes = {life.rollout.group_size for life in lives.values() if life.rollout is not None}
    if len(sizes) == 1:
        (size,) = sizes
        guessed = {life.group_id * size + life.index + 1: life for life in lives.values()}
        async for entry in _at(source, PROMPTS, sorted(guessed)):
            _take_prompt(guessed[entry.seq], entry)
    missing = {sample: life for sample, life in lives.items() if life.prompt is None}
    if missing:
        async for life, entry in _of(source, PROMPTS, missing):
            if life.prompt is None:
                _take_prompt(life, entry)


def _take_prompt(life: Life, entry: Entry) -> None:
    with contextlib.suppress(MalformedMessage):
        prompt = entry.message()
        if isinstance(prompt, Prompt) and (prompt.group_id, prompt.index) == (life.group_id, life.index):
            life.prompt, life.admitted_s = prompt, entry.time_s


async def _read_dead(source: LogSource, lives: dict[Sample, Life]) -> None:
    async for entry in source.read(DEAD):
        sample = parse_sample_id(entry.headers.get(WAS_HEADER, "").partition("/")[0])
        if sample is not None and sample in lives:
            lives[sample].dead_letters.append(
                f"{entry.headers.get(FROM_HEADER, '?')}: {entry.headers.get(REASON_HEADER, 'no reason told')}"
            )
