"""That a version is late is nobody's failure: what waits for it must neither be dropped nor hold a worker up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from actors.rollout.actor import VERSION_WAIT_S, RolloutWorker
from actors.rollout.config import RolloutConfig
from bus.memory import MemoryBus, MemoryHub
from bus.table import DEAD, DELIVERIES_MAX, ROLLOUT_WORKERS, ROLLOUTS
from schemas import Prompt, WeightVersion
from tests.actors.test_early_stop import GOOD, MAX_NEW, FakeTokenizer, NoWeights, SlowEngine

ASKS = Prompt(group_id=0, index=0, group_size=1, prompt="p", task={}, seed=1, min_version=1)


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus("run", MemoryHub())
    await bus.connect()
    await bus.setup()
    await bus.publish(WeightVersion(version=0, path="v0", digest="sha256-0", nbytes=1))
    await bus.publish(ASKS)
    yield bus
    await bus.close()


def worker_of(bus: MemoryBus) -> RolloutWorker:
    """It holds version 0."""
    engine = SlowEngine({"0-0": GOOD})
    return RolloutWorker(bus, RolloutConfig(max_new_tokens=MAX_NEW), engine, FakeTokenizer(), (), NoWeights(), "w")


async def begun(bus: MemoryBus, running: asyncio.Task[None]) -> None:
    """The prompt is with the worker."""
    async with asyncio.timeout(20):
        while (await bus.backlog(ROLLOUT_WORKERS)).ack_pending == 0:
            if running.done():
                running.result()
            await asyncio.sleep(0.01)


async def test_what_has_waited_often_for_its_version_is_made_once_that_is_here(bus: MemoryBus) -> None:
    """It was dropped as a dead letter after twenty waits, however late the version came."""
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        for _ in range(2 * DELIVERIES_MAX):
            [delivery] = await subscription.fetch(1, 1.0)
            await delivery.nak()
    stop = asyncio.Event()
    running = asyncio.create_task(worker_of(bus).run(stop))
    await begun(bus, running)
    await bus.publish(WeightVersion(version=1, path="v1", digest="sha256-1", nbytes=1))
    async with asyncio.timeout(20):
        while await bus.last(ROLLOUTS) is None:
            assert await bus.last(DEAD) is None
            await asyncio.sleep(0.01)
        stop.set()
        await running


async def test_each_wait_is_longer_than_the_one_before(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """So twenty deliveries, which a worker that has the version goes by, last for hours."""
    asked: list[float] = []
    worker = worker_of(bus)

    async def has_version(version: int, patience_s: float) -> bool:
        asked.append(patience_s)
        return len(asked) == 3

    monkeypatch.setattr(worker, "_has_version", has_version)
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    async with asyncio.timeout(20):
        while await bus.last(ROLLOUTS) is None:
            if running.done():
                running.result()
            await asyncio.sleep(0.01)
        stop.set()
        await running
    assert asked == [VERSION_WAIT_S, 2 * VERSION_WAIT_S, 3 * VERSION_WAIT_S]


async def test_a_worker_that_leaves_gives_at_once_what_waits_for_a_version(bus: MemoryBus) -> None:
    """It went on waiting for ten seconds, until its shell took it away."""
    stop = asyncio.Event()
    running = asyncio.create_task(worker_of(bus).run(stop))
    await begun(bus, running)
    stop.set()
    async with asyncio.timeout(5):
        await running
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        assert len(await subscription.fetch(1, 1.0)) == 1
