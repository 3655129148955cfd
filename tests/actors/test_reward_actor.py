"""The reward worker decides whom to blame for a failure: the sample, or the function. Wrong, it loses samples."""

from __future__ import annotations

import asyncio
import dataclasses
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


async def served(bus: MemoryBus, pool: Pool, seconds: float) -> RewardWorker:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    worker = RewardWorker(bus, RewardConfig(children=2), pool, "reward")
    await worker.run(stop)
    return worker


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


def test_an_episode_that_scored_itself_is_passed_on_and_says_nothing_of_the_function() -> None:
    """Its rewards by turn and its observations go with the verdict; the function that never worked stays to blame."""

    async def main() -> None:
        bus, pool = MemoryBus("run", MemoryHub()), Pool(lambda n: FAILED)
        await bus.setup()
        tokens = {"tokens": [5, 6, 7, 8], "logprobs": [-1, 0, 0, -1], "segments": [(0, 4)], "observations": [1, 2]}
        own = {"reward": 0.5, "token_rewards": [0.25, 0, 0, 0], "step_ends": [0, 3]}
        await bus.publish(dataclasses.replace(rollout(0), **tokens, **own))
        worker = await served(bus, pool, 5.0)
        assert pool.asked == 0
        assert worker.gauges.idle_s > 0  # it waited, and was not "starting" for ever
        (entry,) = await bus.get(SCORED, [1])
        scored = entry.message()
        assert isinstance(scored, Scored)
        assert (scored.verdict, scored.reward, scored.step_ends.tolist()) == ("scored", 0.5, [0, 3])
        assert scored.token_rewards.tolist() == [0.25, 0, 0, 0]
        assert (scored.observations.tolist(), scored.made) == ([1, 2], 2)
        await bus.publish(rollout(1))
        with pytest.raises(UserError, match="8 times in a row"):
            await served(bus, pool, 60.0)

    run_virtual(main())


def test_a_function_is_asked_about_the_last_turn_and_told_of_all_of_them() -> None:
    said = [{"role": "assistant", "content": "5"}, {"role": "user", "content": "no"}]
    plain = RewardRequest.of(rollout(0))
    assert plain.messages == [{"role": "assistant", "content": rollout(0).text}]
    assert plain.turn is None
    arrays = {"tokens": [5, 6, 7, 8], "logprobs": [-1, 0, 0, -1], "segments": [(0, 4)], "observations": [1, 2]}
    asked = RewardRequest.of(dataclasses.replace(rollout(0), messages=said, **arrays))
    assert asked.messages == said
    assert asked.turn == (3, 4)
