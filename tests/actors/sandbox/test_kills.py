"""Whatever is killed while code is scored, every sample gets its verdict, and none a 0 that it did not earn."""

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bus.jetstream import JetStreamBus
from bus.table import SCORED
from ops.nats_server import NatsServer
from schemas import Rollout, Scored
from tests.actors.sandbox.processes import in_sandboxes, programs, words
from tests.bus.samples import rollout

ROOT = Path(__file__).resolve().parents[3]
AHEAD = 20
KILLS = ["sandbox", "program", "program", "child", "worker", "child", "program", *["sandbox"] * 3]
PACE_S = 0.2  # how long a program takes: most kills then hit one at work
RIGHT = "```python\nimport time\ntime.sleep({pace})\nprint(int(input()) + 1)\n```"
WRONG = "```python\nimport time\ntime.sleep({pace})\nprint(0)\n```"


def sample(number: int) -> Rollout:
    text = (RIGHT if number % 2 else WRONG).format(pace=PACE_S)
    return replace(rollout(number), text=text, task={"tests": [{"stdin": "41\n", "stdout": "42\n"}]})


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[JetStreamBus]:
    server = NatsServer()
    bus = JetStreamBus("kills", await server.start(tmp_path), "test")
    await bus.connect()
    await bus.setup(ack_wait_s=2.0)
    try:
        yield bus
    finally:
        await bus.close()
        await server.stop()


class Workers:
    """The worker, started again whenever it ends."""

    def __init__(self, bus: JetStreamBus) -> None:
        self.arguments = [sys.executable, "-m", "tests.actors.sandbox.worker_job", bus.url, bus.run]
        self.process: asyncio.subprocess.Process | None = None
        self.ends: list[int] = []

    async def run(self) -> None:
        while True:
            self.process = await asyncio.create_subprocess_exec(*self.arguments, cwd=ROOT)
            self.ends.append(await self.process.wait())

    def of(self, kind: str) -> list[psutil.Process]:
        """The worker itself, its reward processes, what belongs to sandboxes in them, or the programs alone."""
        assert self.process is not None
        if kind == "worker":
            return self.family()[:1]
        if kind == "child":
            return [process for process in self.family() if "actors.reward.child" in words(process)]
        return in_sandboxes(self.family()) if kind == "sandbox" else programs(self.family())

    def family(self) -> list[psutil.Process]:
        """The worker and all that descend from it."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            worker = psutil.Process(self.process.pid)
            return [worker, *worker.children(recursive=True)]
        return []


async def verdicts(bus: JetStreamBus) -> dict[int, Scored]:
    found = {}
    for seq in range(1, (await bus.info(SCORED)).last_seq + 1):
        message = (await bus.get(SCORED, [seq]))[0].message()
        assert isinstance(message, Scored)
        found[message.group_id] = message
    return found


@pytest.mark.e2e
async def test_verdicts_are_complete_and_none_is_a_silent_0(bus: JetStreamBus) -> None:
    """kill -9 of sandboxes, of reward processes and of the worker, again and again, on a real server."""
    for number in range(AHEAD):
        await bus.publish(sample(number))
    samples = AHEAD
    workers, rng = Workers(bus), random.Random(0)
    waiting, seen = list(KILLS), set[psutil.Process]()
    running = asyncio.create_task(workers.run())
    try:
        async with asyncio.timeout(90):
            while (scored := (await bus.info(SCORED)).messages) < samples or waiting:
                if running.done():
                    running.result()
                await asyncio.sleep(0.3)
                while waiting and samples < scored + AHEAD:  # as long as somebody is to be killed, there is work
                    await bus.publish(sample(samples))
                    samples += 1
                if scored and waiting and (found := workers.of(waiting[-1])):
                    seen |= set(workers.family())
                    with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself just then: once more
                        rng.choice(found).kill()
                        waiting.pop()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        seen |= set(workers.family())
        for process in workers.of("worker"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = await asyncio.to_thread(psutil.wait_procs, seen, 30)
        assert left == [], "the worker's end, however it ended, leaves nothing behind"
    told = {number: (scored.verdict, scored.reward) for number, scored in (await verdicts(bus)).items()}
    assert told == {number: ("scored", float(number % 2)) for number in range(samples)}
    assert len(workers.ends) == KILLS.count("worker"), "it lives through the death of what it started"
