"""kill -9 and SIGSTOP must be as hard as the real ones: a dead process that still writes would hide every crash bug."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bus.memory import MemoryBus
from bus.table import PROMPTS
from ops.sim.network import SimBus
from ops.sim.scenario import Scenario
from ops.sim.world import RUN, Killed, Process, World
from tests.bus.samples import prompt


def run(world: World, work: Callable[[Process, SimBus], Awaitable[None]]) -> int:
    """How many prompts the log holds after `work`, done in a process that the world may strike."""

    async def main() -> None:
        await MemoryBus(RUN, world.hub).setup()
        process = Process(world, "victim", 1)
        await asyncio.wait([process.create_task(work(process, SimBus(process)))])
        await asyncio.sleep(100.0)

    world.loop.run_until_complete(main())
    world.loop.close()
    return world.hub.runs[RUN].logs[PROMPTS.name].last_seq


def test_what_a_killed_process_does_in_finally_has_no_effect() -> None:
    world = World(Scenario(1))

    async def work(process: Process, bus: SimBus) -> None:
        try:
            world.kill(process)
            await asyncio.sleep(1.0)
        finally:
            with pytest.raises(Killed):
                await bus.publish(prompt(1))

    assert run(world, work) == 0


def test_a_task_that_a_killed_process_still_starts_is_cancelled() -> None:
    world = World(Scenario(1))
    ran = []

    async def work(process: Process, bus: SimBus) -> None:
        async def more() -> None:
            ran.append(1)

        try:
            world.kill(process)
            await asyncio.sleep(1.0)
        finally:
            task = asyncio.create_task(more())
            await asyncio.wait([task])

    run(world, work)
    assert ran == []


def test_a_call_in_a_thread_of_a_killed_process_has_no_effect() -> None:
    world = World(Scenario(1, disk_s=10.0))
    done = []

    async def work(process: Process, bus: SimBus) -> None:
        world.later(0.001, world.kill, process)
        await asyncio.to_thread(done.append, 1)

    run(world, work)
    assert done == []


def test_what_was_sent_before_the_kill_arrives() -> None:
    """It is in the network, out of reach of any kill."""
    world = World(Scenario(1, network_s=1.0))

    async def work(process: Process, bus: SimBus) -> None:
        world.later(1e-6, world.kill, process)
        await bus.publish(prompt(1))

    assert run(world, work) == 1


def test_a_stopped_process_does_nothing_until_it_goes_on() -> None:
    world = World(Scenario(1))
    stored_at = []

    async def work(process: Process, bus: SimBus) -> None:
        process.stopped = True
        world.later(50.0, process.go_on)
        await bus.publish(prompt(1))
        stored_at.append(world.loop.time())
        process.stopped = True
        world.later(10.0, process.go_on)
        await asyncio.to_thread(stored_at.append, 0.0)
        stored_at.append(world.loop.time())

    assert run(world, work) == 1
    assert stored_at[0] >= 50.0
    assert stored_at[2] >= stored_at[0] + 10.0


def test_a_process_that_is_cut_off_publishes_when_it_is_connected_again() -> None:
    world = World(Scenario(1))

    async def work(process: Process, bus: SimBus) -> None:
        process.cut_until_s = 30.0
        await bus.publish(prompt(1))
        assert world.loop.time() >= 30.0

    assert run(world, work) == 1
    assert not world.violations
