"""The reward worker decides whom to blame for a failure: the sample, or the function. Wrong, it loses samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from actors.reward.actor import RewardWorker
from actors.reward.config import RewardConfig
from actors.reward.verdict import RewardRequest, Verdict
from bus.memory import MemoryBus, MemoryHub
from bus.table import REWARD_WORKERS, ROLLOUTS, SCORED
from ops.sim.loop import run_virtual
from schemas import Scored, UserError
from tests.bus.samples import rollout

STARTS = 5
FAILED = Verdict("error", detail="NameError")


class Pool:
    """Answers what `judge` says of the n-th question."""

    def __init__(self, judge: Callable[[int], Verdict]) -> None:
        self.judge = judge
        self.asked = 0

    digest = ""

    async def start(self) -> None: ...

    async def reload(self) -> str:
        return self.digest

    async def score(self, request: RewardRequest) -> Verdict:
        await asyncio.sleep(0.01)
        self.asked += 1
        return self.judge(self.asked)

    async def close(self) -> None: ...


async def served(bus: MemoryBus, pool: Pool, seconds: float) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    await RewardWorker(bus, RewardConfig(children=2), pool, "reward").run(stop)


async def log_of(samples: int) -> MemoryBus:
    bus = MemoryBus("run", MemoryHub())
    await bus.setup()
    for group in range(samples):
        await bus.publish(rollout(group))
    return bus


def test_a_function_that_never_works_costs_a_sample_two_deliveries_a_start_at_most() -> None:
    """One for the trial, one for a fetch under way. A message is given up after twenty: a few starts used them up."""

    async def main() -> None:
        bus, pool = await log_of(3), Pool(lambda n: FAILED)
        for _ in range(STARTS):
            with pytest.raises(UserError, match=r"NameError \d+ times in a row"):
                await served(bus, pool, 60.0)
        async with bus.subscribe(REWARD_WORKERS) as subscription:
            deliveries = await subscription.fetch(3, 10.0)
        assert all(delivery.deliveries <= 2 * STARTS + 1 for delivery in deliveries)
        assert (await bus.info(SCORED)).messages == 0

    run_virtual(main())


def test_a_function_that_worked_once_fails_for_the_sample() -> None:
    async def main() -> None:
        bus = await log_of(3)
        await served(bus, Pool(lambda n: Verdict("scored", 1.0) if n <= 2 else FAILED), 5.0)
        verdicts = [(await bus.get(SCORED, [seq]))[0].message() for seq in (1, 2, 3)]
        assert sorted(v.verdict for v in verdicts if isinstance(v, Scored)) == ["error", "scored", "scored"]
        assert (await bus.info(ROLLOUTS)).messages == 3

    run_virtual(main())
