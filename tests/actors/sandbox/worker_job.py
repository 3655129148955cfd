"""A code reward worker in a process that is there to be killed: `python -m tests.actors.sandbox.worker_job URL RUN`."""

import asyncio
import sys

from actors.reward.actor import RewardWorker
from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from bus.jetstream import JetStreamBus

CONFIG = RewardConfig(function="code", options={"score": "fraction"}, children=2, retries=2)


async def main(url: str, run: str) -> None:
    bus = JetStreamBus(run, url, "reward-0")
    await bus.connect()
    await RewardWorker(bus, CONFIG, RewardPool(CONFIG), "reward-0").run(asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
