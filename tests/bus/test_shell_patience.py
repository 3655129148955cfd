"""How often a message may be given out: what kills workers must end, and what comes further must not."""

import asyncio

import pytest

from bus.memory import MemoryBus
from bus.port import Entry
from bus.shell import serve
from bus.table import DEAD, DELIVERIES_MAX, ROLLOUT_WORKERS, ROLLOUTS
from tests.bus.samples import prompt
from tests.bus.test_shell import ACK_WAIT_S, answer, messages, new_bus, settled, until


@pytest.mark.parametrize("more", [1, 2])
async def test_what_comes_further_with_every_delivery_may_have_more_of_them(more: int) -> None:
    """An answer of an hour, on machines that come and go, is handed over more often than a poisoned one is tried."""
    bus: MemoryBus = await new_bus(ACK_WAIT_S)
    await bus.publish(prompt(1))
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        for _ in range(DELIVERIES_MAX + 1):
            [delivery] = await subscription.fetch(1, 1.0)
            await delivery.nak()
    asked: list[str] = []

    async def allowed(entry: Entry) -> int:
        asked.append(entry.id)
        return more

    stop = asyncio.Event()
    worker = asyncio.create_task(serve(bus, ROLLOUT_WORKERS, answer, room=lambda: 1, stop=stop, name="w", more=allowed))
    await until(settled(bus))
    stop.set()
    async with asyncio.timeout(20):
        await worker
    assert asked == [prompt(1).sample_id]
    assert (await messages(bus, ROLLOUTS), await messages(bus, DEAD)) == ((0, 1) if more == 1 else (1, 0))
