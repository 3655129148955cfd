"""What became of all tokens that were generated: trained, or discarded, and by what."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from bus.port import Bus, Entry
from bus.reading import read_to_end
from bus.table import BATCHES, DROPPED, PARTIALS, ROLLOUTS, STEPS
from schemas import Batch, Dropped, Message, Partial, Rollout, Segments, StepDone
from schemas.trajectory import model_segments


class Meter:
    """Tokens that processes generated, by their beats. A beat is up to a second old when a process is killed: what it
    generated since is reckoned at the rate of its last two beats.
    """

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, float]] = {}  # process -> (Unix time, tokens)
        self._rate: dict[str, float] = {}
        self._since_beat: dict[str, float] = {}

    def heard(self, beat: Mapping[str, Any], now_s: float) -> None:
        """Take a beat."""
        process, tokens = str(beat.get("process", "")), beat.get("tokens_generated")
        if not process or not isinstance(tokens, int | float):
            return
        if process in self._newest:
            then_s, before = self._newest[process]
            self._rate[process] = max(0.0, tokens - before) / max(1e-3, now_s - then_s)
        self._newest[process] = (now_s, float(tokens))

    def killed(self, pid: int, now_s: float) -> None:
        """A process was killed."""
        for process, (then_s, _) in self._newest.items():
            if process.endswith(f":{pid}"):
                self._since_beat[process] = (now_s - then_s) * self._rate.get(process, 0.0)

    @property
    def tokens(self) -> float:
        """All of them."""
        return sum(tokens for _, tokens in self._newest.values()) + sum(self._since_beat.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """Tokens of answers. `generated` by the beats; the others by the log. `ages[k]` trained tokens were k versions old.

    `dropped` by reason; `unfinished` are in handed-over prefixes of samples that go on.
    """

    generated: float
    finished: int
    unfinished: int
    masked: int
    dropped: Mapping[str, int]
    ages: tuple[int, ...]
    steps: int

    @property
    def lost(self) -> float:
        """Tokens that died with a worker, or were generated twice."""
        return max(0.0, self.generated - self.finished - self.unfinished)

    @property
    def discarded(self) -> float:
        """The share of all tokens that was generated in vain."""
        return (self.lost + self.masked + sum(self.dropped.values())) / max(1.0, self.generated)

    @property
    def age(self) -> float:
        """Mean age of trained tokens in versions."""
        return sum(age * count for age, count in enumerate(self.ages)) / max(1, sum(self.ages))


async def account(bus: Bus, generated: float) -> Account:
    """Read the log of a run in which nobody generates just now."""
    lengths: dict[str, int] = {}
    segments: dict[int, Segments] = {}
    async for seq, rollout in _messages(bus, ROLLOUTS, Rollout):
        segments[seq] = model_segments(rollout.segments, rollout.observations)
        lengths[rollout.sample_id] = sum(count for _, count in segments[seq])
    unfinished = 0
    async for _, partial in _messages(bus, PARTIALS, Partial):
        unfinished += len(partial.tokens) if partial.sample_id not in lengths else 0
    masked = 0
    dropped: Counter[str] = Counter()
    async for _, batch in _messages(bus, BATCHES, Batch):
        for seq in batch.rollout_seqs.tolist():
            masked += sum(count for version, count in segments[seq] if batch.step - version > batch.max_staleness)
    async for _, drop in _messages(bus, DROPPED, Dropped):
        dropped[drop.reason] += drop.tokens
    ages: Counter[int] = Counter()
    steps: set[int] = set()
    async for _, step in _messages(bus, STEPS, StepDone):
        if step.step not in steps:
            steps.add(step.step)
            ages.update(dict(enumerate(step.staleness.tolist())))
    by_age = tuple(ages[age] for age in range(max(ages, default=-1) + 1))
    return Account(generated, sum(lengths.values()), unfinished, masked, dropped, by_age, len(steps))


async def _messages(bus: Bus, stream: Any, kind: type[Message]) -> Any:
    entry: Entry
    async for entry in read_to_end(bus, stream):
        message = entry.message()
        if isinstance(message, kind):
            yield entry.seq, message
