"""A worker that takes more prompts than engines can answer keeps them from workers that join; one that takes fewer
lets the engines wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.episode.actor import EpisodeWorker
from actors.episode.builtin import Function
from actors.episode.capacity import LOOK_S, STEP, Capacity
from actors.episode.config import EpisodeConfig
from bus.memory import MemoryBus, MemoryHub
from bus.port import Bus, Delivery, Entry
from bus.shell import serve
from bus.table import ROLLOUT_WORKERS, ROLLOUTS, TURN_WORKERS
from ops.sim.loop import run_virtual
from schemas import Answer, Message, Prompt, Rollout, Turn
from tests.actors.episode.test_episode_worker import Digits

TURNS = 3
ANSWER_S = 0.4  # of one turn in an engine, on average
AT_ONCE = 128


class Engine:
    """Answers `slots` turns at a time, each in about `ANSWER_S`; `busy` of them now."""

    def __init__(self, bus: Bus, slots: int) -> None:
        self._bus = bus
        self._slots = slots
        self._rng = Random(0)
        self.busy = 0

    async def run(self) -> None:
        await serve(
            self._bus, TURN_WORKERS, self._answer, room=lambda: self._slots, stop=asyncio.Event(), name="engine"
        )

    async def _answer(self, message: Message, delivery: Delivery) -> list[Message]:
        assert isinstance(message, Turn)
        self.busy += 1
        await asyncio.sleep(ANSWER_S * self._rng.uniform(0.5, 1.5))
        self.busy -= 1
        tokens, logprobs, segments = np.array([5], "<i4"), np.array([-1.0], "<f4"), ((0, 1),)
        return [
            Answer(
                group_id=message.group_id, index=0, turn=message.id, tokens=tokens, logprobs=logprobs,
                segments=segments, finish="stop", text="5",
            )
        ]  # fmt: skip


async def episode(prompt: Prompt, policy: Any) -> float:
    """Some turns, one after the other."""
    conversation = policy.chat()
    for turn in range(TURNS):
        await conversation.ask("3" if turn else ())
    return 1.0


@contextlib.asynccontextmanager
async def at_work(work: Any) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def worker(bus: Bus, name: str) -> Any:
    actor = EpisodeWorker(bus, EpisodeConfig(at_once=AT_ONCE), Function(episode, {}), Digits(), 8, name)
    return actor.run(asyncio.Event())


async def log_with(prompts: int) -> tuple[MemoryBus, list[str]]:
    """A log with so many prompts, and by whom its rollouts are, as they come."""
    made: list[str] = []

    def stored(entry: Entry) -> None:
        if entry.stream is ROLLOUTS:
            rollout = entry.message()
            assert isinstance(rollout, Rollout)
            made.append(rollout.worker)

    bus = MemoryBus("run", MemoryHub(on_stored=stored))
    await bus.setup(ack_wait_s=2.0)
    for group in range(prompts):
        await bus.publish(of_group(group))
    return bus, made


def of_group(group: int) -> Prompt:
    return Prompt(group_id=group, index=0, group_size=1, prompt="2", task={}, seed=7, min_version=0)


async def until(holds: Callable[[], bool], *tasks: asyncio.Task[None]) -> float:
    """Virtual seconds until something holds."""
    began_s = asyncio.get_running_loop().time()
    async with asyncio.timeout(600):
        while not holds():
            for task in tasks:
                assert not task.done(), task.exception()
            await asyncio.sleep(0.1)
    return asyncio.get_running_loop().time() - began_s


@pytest.mark.parametrize("slots", [4, 48])
def test_the_engines_never_run_dry(slots: int) -> None:
    prompts = 10 * slots

    async def scene() -> list[int]:
        bus, made = await log_with(prompts)
        engine, busy = Engine(bus, slots), []
        async with at_work(engine.run()) as model, at_work(worker(bus, "episode-0")) as one:
            await until(lambda: len(made) >= prompts // 4, model, one)
            while len(made) < prompts // 4 * 3:
                await asyncio.sleep(0.1)
                busy.append(engine.busy)
        return busy

    busy, _ = run_virtual(scene())
    assert sum(busy) / len(busy) >= 0.95 * slots


def test_a_burst_of_prompts_fills_the_engines_within_a_second() -> None:
    """A step's prompts come together: to begin them by and by would leave the engines half empty each time."""

    async def scene() -> float:
        bus, _ = await log_with(0)
        engine = Engine(bus, 64)
        async with at_work(engine.run()) as model, at_work(worker(bus, "episode-0")) as one:
            await asyncio.sleep(2.0)
            for group in range(128):
                await bus.publish(of_group(group))
            return await until(lambda: engine.busy == 64, model, one)

    seconds, _ = run_virtual(scene())
    assert seconds < 1.0


def test_one_that_joins_shares_the_load_and_takes_all_of_it_when_the_other_is_killed() -> None:
    """The first has as many prompts as it would need for itself alone, and begins what the engines can answer."""
    prompts = 400

    async def scene() -> None:
        bus, made = await log_with(prompts)
        async with at_work(Engine(bus, 16).run()) as model, at_work(worker(bus, "episode-0")) as first:
            await asyncio.sleep(4.0)
            assert (await bus.backlog(ROLLOUT_WORKERS)).ack_pending < AT_ONCE // 2
            async with at_work(worker(bus, "episode-1")) as second:
                assert await until(lambda: "episode-1" in made, model, first, second) < 5.0
                await asyncio.sleep(5.0)
                since = len(made)
                await asyncio.sleep(5.0)
                share = Counter(made[since:])
                assert min(share["episode-0"], share["episode-1"]) > 0.2 * share.total(), share
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                killed_at = len(made)
                await until(lambda: len(made) == prompts, model, second)
                assert set(made[killed_at:]) == {"episode-1"}

    run_virtual(scene())


@given(st.integers(1, 4096), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 1000)), max_size=20))
def test_the_room_is_what_the_table_says(at_once: int, looks: list[tuple[int, int]]) -> None:
    capacity = Capacity(at_once)
    step, total = max(STEP, at_once // 16), 0
    assert capacity.room == min(step, at_once)
    for k, (waiting, lately) in enumerate(looks):
        running = capacity.room  # it takes all that it may
        total += lately
        capacity.looked((k + 1) * LOOK_S, running, waiting, total)
        open_ = waiting <= STEP or waiting <= lately
        assert capacity.room == (min(at_once, running + step) if open_ else 0)
