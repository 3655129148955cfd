"""Publishing versions beside the training: encoding one overlaps the step that makes the next.

    take       a copy of the weights, once the version before is announced: at most one is under way
    announce   in the background: bytes, then the event, then the step's `StepDone`; then old versions go
    settled    waits for that: before a checkpoint, and before the trainer ends

So versions are announced in order, and a checkpoint never holds a step that the log may come to lack.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from actors import clock
from actors.trainer.config import TrainerConfig
from bus.port import Bus, Fenced
from bus.table import WEIGHTS
from bus.weights.writer import Snapshot
from schemas import StepDone, WeightVersion


class WriterPort(Protocol):
    """Where weights' bytes go; `bus.weights.WeightWriter` is it."""

    def snapshot(self, version: int, weights: Mapping[str, Any]) -> Snapshot:
        """A copy of the weights, to be published later."""

    def publish(self, snapshot: Snapshot, before: Snapshot | None = None) -> WeightVersion:
        """Write a version, durably and atomically; returns what to announce. A delta may stand on `before`."""

    def collect(self, keep_from_version: int, keep: set[int]) -> list[int]:
        """Delete the versions below `keep_from_version` that are not in `keep`, nor stood on; returns them."""


class Publisher:
    """Publishes what a trainer makes; of a job's ranks the first one has it.

    `published` is the newest version in the log when the trainer began, -1 if there is none: up to there nothing is
    announced, and that one must be ours. `kept` are versions that must stay, besides those that the config keeps.
    """

    def __init__(
        self, bus: Bus, config: TrainerConfig, writer: WriterPort, published: int, kept: Callable[[], set[int]]
    ) -> None:
        self.failed = asyncio.Event()  # then `settled` raises why
        self._bus = bus
        self._config = config
        self._writer = writer
        self._published = published
        self._kept = kept
        self._before: Snapshot | None = None  # what a delta may stand on; a copy of all weights, so only for that
        self._under_way: asyncio.Task[None] | None = None

    async def take(self, version: int, weights: Callable[[], Mapping[str, Any]]) -> Snapshot | None:
        """A copy of the weights of `version`, when the version before is announced; None if the log has a later one."""
        await self.settled()
        if version < self._published:
            return None
        return await asyncio.to_thread(lambda: self._writer.snapshot(version, weights()))

    async def announce(self, snapshot: Snapshot | None, done: StepDone | None = None) -> None:
        """Publish what was taken, and then `done`; returns at once if the config lets publishing overlap training."""
        await self.settled()
        self._under_way = asyncio.create_task(self._announce(snapshot, done), name="trainer publishes")
        self._under_way.add_done_callback(self._look)
        if not self._config.publish.overlap:
            await self.settled()

    async def settled(self) -> None:
        """Wait until all is published. Raises what kept it from that."""
        if self._under_way is not None:
            await self._under_way
            self._under_way = None

    async def close(self) -> None:
        """Give up what is under way."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)

    def _look(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.failed.set()

    async def _announce(self, snapshot: Snapshot | None, done: StepDone | None) -> None:
        began = clock.monotonic_s()
        if snapshot is not None:
            await self._announce_version(snapshot)
        if done is not None:
            done = dataclasses.replace(done, metrics=done.metrics | {"seconds_announcing": clock.monotonic_s() - began})
            with contextlib.suppress(Fenced):  # stands there from before a crash; its times were those of that time
                await self._bus.publish_fenced([done], done.step)
        if snapshot is not None:
            keep_from = snapshot.version - self._config.keep_versions + 1
            await asyncio.to_thread(lambda: self._writer.collect(keep_from, {0} | self._kept()))

    async def _announce_version(self, snapshot: Snapshot) -> None:
        """Bytes first, then the event. When replay catches up with the log, its newest version must be ours."""
        before, self._before = self._before, snapshot if self._config.publish.delta else None
        if snapshot.version == self._published:  # whole, so that readers have it whatever became of a delta's base
            await self._check_same(snapshot)
            await asyncio.to_thread(self._writer.publish, snapshot)
            return
        event = await asyncio.to_thread(self._writer.publish, snapshot, before)
        try:
            await self._bus.publish_fenced([event], event.version)  # version v stands at sequence v + 1
        except Fenced:
            await self._check_same(snapshot)

    async def _check_same(self, snapshot: Snapshot) -> None:
        """The version was published before a crash: then it must be the same, or somebody else trains this run."""
        (entry,) = await self._bus.get(WEIGHTS, [snapshot.version + 1])
        stored = entry.message()
        if not isinstance(stored, WeightVersion) or stored.version != snapshot.version:
            raise Fenced(f"the weights stream holds something else at version {snapshot.version}")
        if stored.result_digest != snapshot.digest:
            raise Fenced(
                f"version {snapshot.version} was published with digest {stored.result_digest}, but this trainer has "
                f"computed {snapshot.digest}: another trainer is at work, training is not deterministic on this "
                "device, or the number of ranks was changed after a crash, which only an orderly stop allows"
            )
