"""What the trainer reads of evaluations decides which checkpoint is kept, and may never hold the training up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from actors.evaluator.schedule import lease_name
from actors.trainer import evaluations
from actors.trainer.evaluations import Evaluations
from bus.memory import MemoryBus, MemoryHub
from bus.port import BusUnavailable
from bus.table import Stream
from schemas import Evaluation

EVERY = 10


def evaluation(version: int, reward: float | None, data: str = "held-out", skipped: tuple[int, ...] = ()) -> Evaluation:
    verdicts = {"timeout": 1} if reward is None else {"scored": 1}
    return Evaluation(version=version, data=data, reward=reward, count=1, verdicts=verdicts, skipped=skipped)


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus("run", MemoryHub())
    await bus.setup()
    yield bus
    await bus.close()


async def test_scores_are_those_on_the_data_of_the_newest_evaluation(bus: MemoryBus) -> None:
    """Rewards on other problems say nothing about which version is better."""
    reader = Evaluations(bus, EVERY)
    assert not (await reader.judged([10])).scores
    await bus.publish(evaluation(0, 0.9, data="easy"))
    await bus.publish(evaluation(10, 0.8, data="easy"))
    assert (await reader.judged([10])).scores == {0: 0.9, 10: 0.8}
    await bus.publish(evaluation(20, 0.2))
    await bus.publish(evaluation(30, None))
    assert (await reader.judged([10])).scores == {20: 0.2}


async def test_a_version_whose_evaluation_somebody_is_at_is_told(bus: MemoryBus) -> None:
    reader = Evaluations(bus, EVERY)
    await bus.publish(evaluation(20, 0.5, skipped=(10,)))
    for version in (10, 15, 20, 30, 40):
        assert await bus.acquire(lease_name(version), "evaluator", 30.0) is not None
    judged = await reader.judged([5, 10, 15, 20, 30, 50])  # 40 has no checkpoint
    assert judged.at_work == {30}


class Silent(MemoryBus):
    async def last(self, stream: Stream, key: str = "") -> None:
        await asyncio.sleep(60)


class Lost(MemoryBus):
    async def last(self, stream: Stream, key: str = "") -> None:
        raise BusUnavailable("no answer")


@pytest.mark.parametrize("kind", [Silent, Lost])
async def test_a_log_that_does_not_answer_is_not_waited_for(
    kind: type[MemoryBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluations, "WAIT_S", 0.2)
    bus = kind("run", MemoryHub())
    await bus.setup()
    await bus.publish(evaluation(10, 0.5))
    judged = await asyncio.wait_for(Evaluations(bus, EVERY).judged([20]), 20.0)
    assert (judged.scores, judged.at_work) == ({10: 0.5}, frozenset())
