"""Whatever is slow, it must show as somebody's named waiting, never as a queue that grows or as memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from actors.controller import actor as controller_actor
from actors.controller.actor import Controller
from actors.controller.config import ControllerConfig
from actors.controller.core import ControllerCore
from actors.controller.stages import Stages
from bus.memory import MemoryBus, MemoryHub
from bus.table import BATCHES, PROMPTS, REWARD_WORKERS, ROLLOUT_WORKERS, ROLLOUTS, Consumer
from schemas import Message, Prompt, Rollout, Scored, WeightVersion

ETA, BATCH, GROUP = 4, 4, 2
MOST = (ETA + 1) * BATCH * GROUP
GROWTH_BYTES = 100_000


@pytest.fixture
async def bus(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MemoryBus]:
    monkeypatch.setattr(controller_actor, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(controller_actor, "WAKE_S", 0.01)
    bus = MemoryBus("run", MemoryHub())
    await bus.connect()
    await bus.setup()
    yield bus
    await bus.close()


def weights(version: int) -> WeightVersion:
    return WeightVersion(version=version, path=f"v{version}", digest="d", nbytes=1)


async def worker(bus: MemoryBus, consumer: Consumer, handle: Callable[[Any, int], Awaitable[Message]]) -> None:
    async with bus.subscribe(consumer) as subscription:
        while True:
            for delivery in await subscription.fetch(8, 1.0):
                await bus.publish(await handle(delivery.entry.message(), delivery.entry.seq))
                await delivery.ack()


async def generate(prompt: Prompt, seq: int) -> Message:
    return Rollout(
        group_id=prompt.group_id, index=prompt.index, group_size=GROUP, prompt="p", task={},
        prompt_tokens=np.array([1], "<i4"), tokens=np.array([2, 3], "<i4"), logprobs=np.array([-1, -1], "<f4"),
        segments=((prompt.min_version, 2),), finish="stop", text="t",
    )  # fmt: skip


async def score(rollout: Rollout, seq: int) -> Message:
    return Scored(
        group_id=rollout.group_id, index=rollout.index, group_size=GROUP, rollout_seq=seq, prompt_length=1,
        segments=rollout.segments, finish="stop", verdict="scored", reward=float(rollout.index),
    )  # fmt: skip


async def never(message: Any, seq: int) -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@contextlib.asynccontextmanager
async def running(bus: MemoryBus, generating: Any, scoring: Any, **config: Any) -> AsyncIterator[Controller]:
    settings = ControllerConfig(max_staleness=ETA, batch_groups=BATCH, group_size=GROUP, **config)
    controller = Controller(bus, settings, steps=1000, seed=0, row=lambda k: {"prompt": f"p{k}"})
    await bus.publish(weights(0))
    stop = asyncio.Event()
    leading = asyncio.create_task(controller.run(stop))
    tasks = [
        asyncio.create_task(worker(bus, ROLLOUT_WORKERS, generating)),
        asyncio.create_task(worker(bus, REWARD_WORKERS, scoring)),
    ]
    try:
        yield controller
    finally:
        stop.set()
        for task in tasks:
            task.cancel()
        await asyncio.wait([leading, *tasks], timeout=30)
        leading.result()


async def settles(bus: MemoryBus, controller: Controller, why: str, holds: Callable[[], bool]) -> None:
    """It comes to stand where `holds`; then its queues stay as they are, and it says why it waits."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while not (holds() and controller.gauges.state == f"waiting for {why}"):
                await asyncio.sleep(0.01)
    assert holds(), controller._read_gauges()
    controller.gauges.beat_now()
    before = [(await bus.info(stream)).last_seq for stream in (PROMPTS, ROLLOUTS, BATCHES)]
    gc.collect()
    tracemalloc.start()
    try:
        await asyncio.sleep(1.0)  # a hundred turns of the controller
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(await bus.info(stream)).last_seq for stream in (PROMPTS, ROLLOUTS, BATCHES)] == before
    assert grown < GROWTH_BYTES
    beat = controller.gauges.beat_now()
    assert beat["idle_why"] == why
    assert beat["idle_share"] > 0.8


def _in_flight(controller: Controller) -> int:
    """Samples, -1 before it leads."""
    return controller.core.in_flight * GROUP if controller.core is not None and controller.core.in_flight else -1


@pytest.mark.parametrize("pace", [True, False])
async def test_a_reward_that_does_not_answer_holds_prompts_back(bus: MemoryBus, pace: bool) -> None:
    async with running(bus, generate, never, pace=pace) as controller:
        await settles(bus, controller, "rewards", lambda: controller._stages.scoring == _in_flight(controller))
        prompts = (await bus.info(PROMPTS)).last_seq
        assert prompts == _in_flight(controller)
        assert BATCH * GROUP <= prompts <= (1.5 * BATCH * GROUP if pace else MOST)
        assert controller._read_gauges()["scoring_samples"] == prompts


async def test_a_trainer_that_is_slow_finds_one_batch_ahead_and_no_more(bus: MemoryBus) -> None:
    async with running(bus, generate, score) as controller:
        await settles(bus, controller, "the trainer", lambda: controller._stages == Stages())
        assert (await bus.info(BATCHES)).last_seq == 2, "the one that it trains, and the next"
        assert controller.core is not None
        in_training = BATCH * GROUP
        assert (await bus.info(PROMPTS)).last_seq == in_training + _in_flight(controller)
        assert controller.core.in_flight <= controller.core.pace.limit <= 2 * BATCH
        await bus.publish(weights(1))
        async with asyncio.timeout(30):
            while (await bus.info(BATCHES)).last_seq < 3:
                await asyncio.sleep(0.01)


async def test_where_nobody_generates_the_controller_says_so(bus: MemoryBus) -> None:
    async with running(bus, never, score) as controller:
        await settles(bus, controller, "generation", lambda: controller._stages.unbegun > 0)


def test_each_cause_has_its_name() -> None:
    core = ControllerCore(ControllerConfig(), steps=10)
    assert Stages().limit(core) == "the first weights"
    core.saw_weights(0)
    assert Stages(unbegun=3, generating=5, scoring=7).limit(core) == "generation"
    assert Stages(unbegun=1, generating=5, scoring=7).limit(core) == "rewards"
    core.next_step = 2
    assert Stages(scoring=7).limit(core) == "the trainer"
    core.paused = True
    assert Stages().limit(core) == "somebody to resume the run"
