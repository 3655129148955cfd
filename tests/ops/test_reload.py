"""`rollstream reward reload` must not say that a function was taken while somebody still scores with the old one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bus.memory import MemoryBus, MemoryHub
from bus.port import Bus
from bus.table import CONTROL
from ops.reload import reload
from schemas import Control, UserError


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    bus = MemoryBus("run", MemoryHub())
    await bus.connect()
    await bus.setup()
    yield bus
    await bus.close()


async def told(bus: Bus, *answers: dict[str, Any] | None) -> tuple[list[str], bool]:
    """What the command says if workers of the old digest `a` answer so; None never does."""

    async def beat() -> None:
        while True:
            asked = await bus.last(CONTROL)
            for i, answer in enumerate(answers):
                own = answer if asked is not None and answer is not None else {}
                seq = {"reload_seq": asked.seq, "digest_before": "a"} if asked is not None and own else {}
                await bus.beat({"actor": f"reward-{i}", "role": "reward", "reward_digest": "a", **seq, **own})
            await bus.beat({"actor": "trainer", "role": "trainer"})
            await asyncio.sleep(0.01)

    beating = asyncio.create_task(beat())
    try:
        async with asyncio.timeout(30):
            return await reload(bus, answer_s=1.0, listen_s=0.1)
    finally:
        beating.cancel()


async def test_each_worker_is_told_with_what_it_runs_now(bus: Bus) -> None:
    lines, taken = await told(bus, {"reward_digest": "b", "reload_error": ""}, {"reload_error": "", "x": 1})
    assert (lines, taken) == (["reward-0: a -> b", "reward-1: a, unchanged"], True)
    entry = await bus.last(CONTROL)
    assert entry is not None
    message = entry.message()
    assert isinstance(message, Control)
    assert message.action == "reload"


async def test_one_that_kept_the_old_function_is_no_success(bus: Bus) -> None:
    lines, taken = await told(bus, {"reward_digest": "b", "reload_error": ""}, {"reload_error": "line 1 failed"})
    assert (lines, taken) == (["reward-0: a -> b", "reward-1: kept a: line 1 failed"], False)


async def test_one_that_does_not_answer_is_no_success(bus: Bus) -> None:
    lines, taken = await told(bus, {"reward_digest": "b", "reload_error": ""}, None)
    assert not taken
    assert lines[1].startswith("reward-1: no answer")


async def test_one_that_has_ended_is_not_waited_for(bus: Bus) -> None:
    lines, taken = await told(bus, {"reward_digest": "b", "reload_error": ""}, {"state": "ended", "reload_seq": 0})
    assert (lines[1], taken) == ("reward-1: has ended", True)


async def test_without_a_worker_nothing_is_asked(bus: Bus) -> None:
    with pytest.raises(UserError, match="No reward worker of run is up"):
        await told(bus)
    assert await bus.last(CONTROL) is None
