"""The log as a replayed trainer sees it: it reads what was recorded, and what it writes goes to who compares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from bus.memory import MemoryBus, MemoryHub
from bus.port import Entry, headers_of, key_of
from bus.table import BATCHES, ROLLOUTS, SCORED, WEIGHTS, Stream
from ops.log_source import LogSource
from schemas import Batch, MalformedMessage, Message, Scored, StepDone, UserError, WeightVersion, encode

RANGE = "Replay up to the step before it with --to, or take an undamaged copy of the recording."
OnVersion: TypeAlias = Callable[[WeightVersion], Awaitable[None]]
OnStep: TypeAlias = Callable[[StepDone], Awaitable[None]]
Rebatch: TypeAlias = Callable[[Batch], Awaitable[tuple[Batch, Mapping[int, Scored]]]]


async def as_recorded(batch: Batch) -> tuple[Batch, Mapping[int, Scored]]:
    """The batch, unchanged, and no verdict of its own."""
    return batch, {}


class ReplayBus(MemoryBus):
    """Batches and rollouts come from a recording, one batch at a time, so that memory stays bounded.

    Of the batches those before step `stop` are there, and they pass through `rebatch`. Weight versions and finished
    steps are handed to `on_version` and `on_step`, which the trainer awaits before it goes on.
    """

    def __init__(
        self, source: LogSource, stop: int, on_version: OnVersion, on_step: OnStep, rebatch: Rebatch = as_recorded
    ) -> None:
        super().__init__(source.run, MemoryHub())
        self._source = source
        self._stop = stop
        self._on_version = on_version
        self._on_step = on_step
        self._rebatch = rebatch
        self._scored: Mapping[int, Scored] = {}  # new verdicts of the batch in hand, by sequence

    async def read(self, stream: Stream, start: int = 1) -> AsyncIterator[Entry]:
        """The recorded batches; never ends, as no stream does."""
        assert stream is BATCHES, f"a trainer reads batches, not {stream.name}"
        async for entry in self._source.read(stream, start, self._stop + 1):  # batch i stands at sequence i + 1
            try:
                batch = entry.message()
            except MalformedMessage as error:
                raise _unreadable(entry, error) from None
            assert isinstance(batch, Batch)
            changed, self._scored = await self._rebatch(batch)
            yield entry if changed is batch else replace(entry, data=encode(changed))
        await asyncio.Event().wait()

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        """The recorded rollouts, or the verdicts, recorded or given anew. Raises `UserError`."""
        assert stream in (ROLLOUTS, SCORED), f"a trainer gets rollouts and verdicts, not {stream.name}"
        if stream is SCORED and self._scored:
            anew = [(seq, self._scored[seq]) for seq in seqs]
            return [Entry(stream, seq, key_of(one), headers_of(self.run, one), encode(one)) for seq, one in anew]
        try:
            entries = await self._source.get(stream, seqs)
        except LookupError as error:
            raise UserError(f"A batch names {stream.name} that are not in the log: {error}.", RANGE) from None
        for entry in entries:
            try:
                entry.message()
            except MalformedMessage as error:
                raise _unreadable(entry, error) from None
        return entries

    async def last(self, stream: Stream, key: str = "") -> Entry | None:
        """Nothing is published yet in a replay, whatever the recording holds."""
        assert stream is WEIGHTS
        return None

    async def publish_fenced(self, messages: Sequence[Message], last_seq: int) -> int:
        """Hand the messages over."""
        for message in messages:
            if isinstance(message, WeightVersion):
                await self._on_version(message)
            elif isinstance(message, StepDone):
                await self._on_step(message)
        return last_seq + len(messages)


def _unreadable(entry: Entry, error: MalformedMessage) -> UserError:
    return UserError(f"Entry {entry.seq} of the {entry.stream.name} is damaged: {error.reason}.", RANGE)
