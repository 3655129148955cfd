"""A worker has hundreds of long answers in hand: who looks at them must not copy them all while the loop waits.

Of 256 answers with 30,000 tokens that took 640 ms, each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from actors.rollout import actor, turn_watch
from actors.rollout.actor import RolloutWorker
from actors.rollout.config import RolloutConfig
from actors.rollout.early_stop import Guard
from actors.rollout.engine import Generation
from actors.rollout.turn_watch import TurnWatch
from bus.memory import MemoryBus, MemoryHub
from schemas import Turn
from tests.actors.test_early_stop import LOOP, FakeTokenizer, NoWeights, SlowEngine, early, request

TURN = Turn(group_id=0, index=0, number=0, prompt_tokens=[1], stop=["x"], seed=1, min_version=0, listener="episode-0")
LOOKS = 5
GROWN = 40  # tokens, more than any of them waits for


class Watched(SlowEngine):
    """Has one answer, which grows when the test says so, and counts the looks and what is copied."""

    def __init__(self, name: str) -> None:
        super().__init__({})
        self.name = name
        self.looks = 0
        self.copied = 0  # tokens
        self.grow(GROWN)

    def grow(self, tokens: int) -> None:
        self.running[self.name] = Generation(
            self.name, (1,), tuple(range(tokens)), (-1.0,) * tokens, ((0, tokens),), None
        )

    async def generate(self, request: Any) -> Generation:
        return await asyncio.Future()

    def lengths(self) -> dict[str, int]:
        self.looks += 1
        return super().lengths()

    def tokens(self, starts: Any) -> dict[str, tuple[int, ...]]:
        found = super().tokens(starts)
        self.copied += sum(map(len, found.values()))
        return found

    def snapshot(self, sample_id: str) -> Generation | None:
        self.copied += len(self.running[sample_id].tokens)
        return super().snapshot(sample_id)


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus("run", MemoryHub())
    await bus.connect()
    await bus.setup()
    yield bus
    await bus.close()


def guarding(engine: Watched, bus: MemoryBus) -> list[Awaitable[Any]]:
    guard = Guard(engine, early(repetition=LOOP))
    return [guard.watch(), guard.generate(request(engine.name))]


def saving(engine: Watched, bus: MemoryBus) -> list[Awaitable[Any]]:
    config = RolloutConfig(slots=8, max_new_tokens=200, partial_every=GROWN)
    return [RolloutWorker(bus, config, engine, FakeTokenizer(), (0,), NoWeights(), "rollout-0")._save_partials()]


def watching(engine: Watched, bus: MemoryBus) -> list[Awaitable[Any]]:
    watch = TurnWatch(bus, engine, lambda tokens: "", "rollout-0")
    return [watch.watch(), watch.generate(TURN, asyncio.Event().wait())]  # type: ignore[arg-type]  # it never ends


@pytest.mark.parametrize(
    ("name", "look", "least"),
    [
        ("0-0", guarding, 0),
        ("0-0", saving, 0),
        (TURN.id, watching, 1 + turn_watch.MARGIN_TOKENS),  # in which a string may begin
    ],
)
async def test_what_has_not_grown_is_not_copied_again(
    name: str,
    look: Callable[[Watched, MemoryBus], list[Awaitable[Any]]],
    least: int,
    bus: MemoryBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.rollout.early_stop.LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(actor, "PARTIALS_EVERY_S", 0.01)
    monkeypatch.setattr(turn_watch, "LOOK_EVERY_S", 0.01)
    engine = Watched(name)
    tasks = [asyncio.ensure_future(one) for one in look(engine, bus)]

    async def looked() -> int:
        """So many tokens were copied in some looks."""
        before, until = engine.copied, engine.looks + LOOKS
        async with asyncio.timeout(20):
            while engine.looks < until:
                done = [task for task in tasks if task.done()]
                assert not done, done
                await asyncio.sleep(0.01)
        return engine.copied - before

    try:
        assert await looked() >= GROWN
        assert await looked() <= (LOOKS + 1) * least
        engine.grow(2 * GROWN)
        assert await looked() >= GROWN
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
