"""The simulation stands on its loop: time must jump, order must be fixed, a deadlock must be seen."""

import asyncio
import time

import pytest

from ops.sim.loop import Deadlock, VirtualLoop, run_virtual


def test_an_hour_of_sleep_costs_no_time() -> None:
    begin = time.monotonic()
    _, seconds = run_virtual(asyncio.sleep(3600.0))
    assert seconds == 3600.0
    assert time.monotonic() - begin < 10


def test_waiting_for_ever_is_a_deadlock() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(work())


def test_a_call_in_a_thread_has_its_effect_between_two_delays_even_if_its_caller_is_cancelled() -> None:
    """A write to disk that has begun is done, whoever waits for it."""
    done_at = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(lambda: done_at.append(loop.time()))
        assert loop.time() == 5.0
        task = asyncio.create_task(asyncio.to_thread(lambda: done_at.append(loop.time())))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.sleep(10.0)

    run_virtual(work(), VirtualLoop(lambda: (2.0, 3.0)))
    assert done_at == [2.0, 7.0]


def test_a_failure_in_a_thread_reaches_its_caller() -> None:
    async def work() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    run_virtual(work())
