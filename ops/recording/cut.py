"""Where a log that still grows is cut, so that what was read of it is consistent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Protocol

from bus.port import StreamInfo
from bus.table import (
    ANSWERS,
    BATCHES,
    CONTROL,
    DEAD,
    DROPPED,
    EVALUATIONS,
    NOTES,
    PARTIALS,
    PROMPTS,
    ROLLOUTS,
    SCORED,
    STEPS,
    TURNS,
    WEIGHTS,
    Stream,
)

# What refers is measured before what it refers to, which can only have grown meanwhile. Drops come after the prompts
# that are held to the gate, and before those that they may end.
CUT_ORDER: Final = (
    EVALUATIONS, STEPS, BATCHES, SCORED, PARTIALS, ROLLOUTS, NOTES, ANSWERS, TURNS, DROPPED, PROMPTS, WEIGHTS, CONTROL,
    DEAD,
)  # fmt: skip


class Measured(Protocol):
    """What tells how long its streams are."""

    async def info(self, stream: Stream) -> StreamInfo:
        """What the stream holds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How far each stream, by name, belongs to it. Prompts up to `gated_seq` are held to I6 (see `ops.invariants`)."""

    gated_seq: int
    streams: Mapping[str, StreamInfo]

    def of(self, stream: Stream) -> StreamInfo:
        """How far a stream belongs to it; a recording may be older than the stream."""
        return self.streams.get(stream.name, StreamInfo(1, 0, 0, 0))


async def cut_of(log: Measured) -> Cut:
    """A consistent cut of a log, now: nothing was started or ended while it was measured.

    Else it could hold the end of a run without the last batch, as if samples had been lost.
    """
    while True:
        controls = (await log.info(CONTROL)).last_seq
        gated_seq = (await log.info(PROMPTS)).last_seq
        cut = Cut(gated_seq, {stream.name: await log.info(stream) for stream in CUT_ORDER})
        if cut.of(CONTROL).last_seq == controls:
            return cut
