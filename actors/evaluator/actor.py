"""The evaluator on the bus: announcements of versions in, evaluations out. Nobody waits for it.

It holds no state that the log lacks. It evaluates the newest version that is due; older ones that came due while it was
at work are skipped, and its next evaluation names them. A lease for each version keeps several evaluators from doing
the same; an evaluation is published only directly behind all that its writer has read, so each stands in the log once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator
from typing import Any, Protocol

import numpy as np
import structlog

from actors import clock
from actors.evaluator.config import EvaluationConfig
from actors.evaluator.held_out import HeldOut, Pool
from actors.evaluator.pins import Pins
from actors.evaluator.schedule import Schedule, lease_name
from actors.gauges import Gauges
from actors.rollout.engine import Engine, WeightsError
from bus.port import Bus, Entry, Fenced
from bus.reading import read_to_end
from bus.table import EVALUATIONS, LEASE_S, LEASES, WEIGHTS
from bus.weights import WeightsError as BytesError
from schemas import Evaluation, MalformedMessage, WeightVersion

log = structlog.get_logger()

BEHIND_S = 0.1  # before trying again to write behind what others have written


class RewardPoolPort(Pool, Protocol):
    """A pool that is started and closed; `actors.reward.pool.RewardPool` is it."""

    async def start(self) -> None:
        """Be ready to score."""

    async def close(self) -> None:
        """End what it has started."""


class Evaluator:
    """Evaluates versions with one engine, which begins with version 0. `pins` keeps the files of versions."""

    def __init__(
        self,
        bus: Bus,
        config: EvaluationConfig,
        steps: int,
        held_out: HeldOut,
        engine: Engine,
        pool: RewardPoolPort,
        pins: Pins,
        name: str,
    ) -> None:
        self.bus = bus
        self.config = config
        self.held_out = held_out
        self.engine = engine
        self.pool = pool
        self.pins = pins
        self.name = name
        self.schedule = Schedule(config.every, steps, held_out.data)
        self._folded_seq = 0  # of the evaluations
        self._at_work = -1
        self._count = 0
        self._news = asyncio.Event()
        self.gauges = Gauges(bus, name, "evaluator", self._read_gauges)

    async def run(self, stop: asyncio.Event) -> None:
        """Evaluate what is due until the last version is done, or until `stop`, which leaves what is in hand."""
        async with self._serving():
            working = asyncio.create_task(self._work(), name=f"{self.name} evaluates")
            stopping = asyncio.create_task(stop.wait())
            followers = [
                asyncio.create_task(self._follow_weights(), name=f"{self.name} follows weights"),
                asyncio.create_task(self._follow_evaluations(), name=f"{self.name} follows evaluations"),
            ]
            tasks: list[asyncio.Task[Any]] = [working, stopping, *followers]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in (working, *followers):
                    if task.done():
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if self.schedule.finished:
                await self.pins.keep_only(set)

    async def once(self, version: int) -> None:
        """Evaluate one version, unless that was done or is being done: then wait for it.

        Raises `bus.weights.WeightsError` if its bytes are gone.
        """
        async with self._serving():
            while version not in self.schedule.done:
                revision = await self.bus.acquire(lease_name(version), self._holder, LEASE_S)
                if revision is None:
                    await asyncio.sleep(LEASE_S / 3)
                    await self._catch_up()
                    continue
                async with self._leased(version, revision):
                    await self._evaluate(version, [])
            await self.pins.keep_only(set)

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """With engine and pool, and with all folded that the log holds."""
        await self.engine.start()
        try:
            await self.pool.start()
            await self.held_out.start()
            async with self.gauges.beating():
                self.gauges.state = "working"
                newest = await self.bus.last(WEIGHTS)
                self.schedule.announced(newest.seq - 1 if newest else 0)  # version v stands at sequence v + 1
                await self._catch_up()
                yield
        finally:
            await self.engine.close()
            await self.held_out.close()
            await self.pool.close()
            self.pins.close()

    # ---- reading

    async def _catch_up(self) -> None:
        """Fold the evaluations that are there now."""
        async for entry in read_to_end(self.bus, EVALUATIONS, self._folded_seq + 1):
            self._fold(entry)

    def _fold(self, entry: Entry) -> None:
        if entry.seq > self._folded_seq:
            self._folded_seq = entry.seq
            with contextlib.suppress(MalformedMessage):  # it says nothing, and its place is taken
                message = entry.message()
                assert isinstance(message, Evaluation)
                self.schedule.evaluated(message)

    async def _follow_evaluations(self) -> None:
        async for entry in self.bus.read(EVALUATIONS, self._folded_seq + 1):
            self._fold(entry)
            self._news.set()

    async def _follow_weights(self) -> None:
        """Pin the newest version that is due as soon as it is announced: when we get to it, it may be collected."""
        async for entry in self.bus.read(WEIGHTS, self.schedule.newest + 1):
            event = entry.message()
            assert isinstance(event, WeightVersion)
            self.schedule.announced(event.version)
            waiting = self.schedule.open[:1]
            if event.version in waiting and event.version != self._at_work:
                with contextlib.suppress(BytesError):  # collected already: so a newer one is announced
                    await self.pins.pin(event)
                await self.pins.keep_only(functools.partial(self._in_use, event.version))
            self._news.set()

    def _in_use(self, next_one: int) -> set[int]:
        return {next_one, self._at_work}

    # ---- working

    async def _work(self) -> None:
        while not self.schedule.finished:
            self._news.clear()
            if not await self._evaluate_newest():
                with self.gauges.waiting("a version that is due"), contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), LEASE_S)  # or until another's lease has passed

    async def _evaluate_newest(self) -> bool:
        """Evaluate the newest open version that nobody else is at; False if there is none."""
        for version in self.schedule.open:
            revision = await self.bus.acquire(lease_name(version), self._holder, LEASE_S)
            if revision is None:
                continue
            async with self._leased(version, revision):
                await self._catch_up()  # who held the lease before may just have published
                if version in self.schedule.done:
                    return True
                try:
                    async with asyncio.timeout(self.config.timeout_s):
                        await self._evaluate(version, self.schedule.passed_by(version))
                except TimeoutError:
                    self._give_up(version, f"it took longer than {self.config.timeout_s:g} s")
                except (BytesError, WeightsError) as error:
                    self._give_up(version, str(error))
            return True
        return False

    def _give_up(self, version: int, why: str) -> None:
        log.warning("evaluation_given_up", version=version, reason=why)
        self.schedule.gave_up(version)

    async def _evaluate(self, version: int, older: list[int]) -> None:
        """Load a version, ask it, publish what came of it; `older` ones are skipped for it."""
        self._at_work = version
        try:
            if self.engine.version != version:
                (entry,) = await self.bus.get(WEIGHTS, [version + 1])
                event = entry.message()
                assert isinstance(event, WeightVersion)
                files = await self.pins.pin(event)
                await self.engine.update(version, files.path, files.base)
            evaluation = await self.held_out.evaluate(self.engine, self.pool, version, self.name)
        finally:
            self._at_work = -1
        await self._publish(evaluation, older)

    async def _publish(self, evaluation: Evaluation, older: list[int]) -> None:
        """Store it directly behind all that was read; whoever was quicker has had the last word on this version."""
        while evaluation.version not in self.schedule.done:
            skipped = [version for version in sorted(older) if await self._is_nobodys(version)]
            message = dataclasses.replace(evaluation, skipped=np.array(skipped, "<i8"))
            try:
                seq = await self.bus.publish_fenced([message], self._folded_seq)
            except Fenced:
                await asyncio.sleep(BEHIND_S)
                await self._catch_up()
                continue
            self._folded_seq = max(self._folded_seq, seq)
            self.schedule.evaluated(message)
            self._count += 1
            log.info("version_evaluated", version=message.version, reward=message.reward, skipped=skipped)

    async def _is_nobodys(self, version: int) -> bool:
        """Whether nobody has evaluated it nor is about to."""
        if version in self.schedule.done:
            return False
        return await self.bus.last(LEASES, lease_name(version)) is None

    # ---- the lease

    @property
    def _holder(self) -> str:
        return f"{self.name}/{clock.process()}"

    @contextlib.asynccontextmanager
    async def _leased(self, version: int, revision: int) -> AsyncIterator[None]:
        """Hold on to the lease of a version. If it is lost, who has it now does the same work: that costs only time."""
        held: int | None = revision

        async def keep() -> None:
            nonlocal held
            while held is not None:
                await asyncio.sleep(LEASE_S / 3)
                held = await self.bus.renew(lease_name(version), self._holder, held, LEASE_S)

        keeper = asyncio.create_task(keep(), name=f"lease of version {version}")
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            if held is not None:
                await self.bus.release(lease_name(version), held)

    def _read_gauges(self) -> dict[str, Any]:
        return {"version": max(self._at_work, self.engine.version), "evaluations": self._count}
