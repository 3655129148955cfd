"""The log as a replayed trainer sees it: it reads what was recorded, and what it writes goes to who compares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from bus.memory import MemoryBus, MemoryHub
from bus.port import Entry
from bus.table import BATCHES, ROLLOUTS, WEIGHTS, Stream
from ops.log_source import LogSource
from schemas import Batch, MalformedMessage, Message, StepDone, UserError, WeightVersion, encode

RANGE = "Replay up to the step before it with --to, or take an undamaged copy of the recording."
OnVersion: TypeAlias = Callable[[WeightVersion], Awaitable[None]]
OnStep: TypeAlias = Callable[[StepDone], Awaitable[None]]
Rebatch: TypeAlias = Callable[[Batch], Awaitable[Batch]]


async def as_recorded(batch: Batch) -> Batch:
    """The batch, unchanged."""
    return batch


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

    async def read(self, stream: Stream, start: int = 1) -> AsyncIterator[Entry]:
        """The recorded batches; never ends, as no stream does."""
        assert stream is BATCHES, f"a trainer reads batches, not {stream.name}"
        async for entry in self._source.read(stream, start, self._stop + 1):  # batch i stands at sequence i + 1
            try:
                batch = entry.message()
            except MalformedMessage as error:
                raise _unreadable(entry, error) from None
            assert isinstance(batch, Batch)
            changed = await self._rebatch(batch)
            yield entry if changed is batch else replace(entry, data=encode(changed))
        await asyncio.Event().wait()

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        """The recorded rollouts at these sequences. Raises `UserError`."""
        assert stream is ROLLOUTS, f"a trainer gets rollouts, not {stream.name}"
        try:
            entries = await self._source.get(stream, seqs)
        except LookupError as error:
            raise UserError(f"A batch names a rollout that is not in the log: {error}.", RANGE) from None
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
