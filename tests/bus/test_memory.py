"""The log in memory on virtual time: it must repeat exactly, and must not be stronger than the real one."""

import asyncio
import dataclasses
import random
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from bus.memory import MemoryBus, MemoryHub
from bus.port import BusFull, BusUnavailable
from bus.shell import serve
from bus.table import DEDUPE_WINDOW_S, PARTIALS, PROMPTS, ROLLOUT_WORKERS, ROLLOUTS
from schemas import Message
from tests.bus.samples import partial, prompt, rollout, take

T = TypeVar("T")


class _SkippingSelector(selectors.DefaultSelector):
    """Does not wait: moves the clock instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "deadlock: nothing is scheduled"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.skipping = _SkippingSelector()
        super().__init__(self.skipping)

    def time(self) -> float:
        return self.skipping.now_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


async def fresh(ack_wait_s: float | None = None) -> MemoryBus:
    bus = MemoryBus("run", MemoryHub())
    await bus.setup(ack_wait_s)
    return bus


def test_redelivery_takes_virtual_time_only() -> None:
    async def main() -> float:
        bus = await fresh(ack_wait_s=3600.0)
        await bus.publish(prompt(1))
        async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
            await subscription.fetch(1, 1.0)
            [again] = await subscription.fetch(1, 7200.0)
            assert again.deliveries == 2
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(3600.0)


def test_a_repeated_id_is_stored_again_after_the_window() -> None:
    """Readers that trust the broker for ever must fail in the simulation."""

    async def main() -> None:
        bus = await fresh()
        await bus.publish(prompt(1))
        await asyncio.sleep(DEDUPE_WINDOW_S - 1)
        assert (await bus.publish(prompt(1))).duplicate
        await asyncio.sleep(2)
        again = await bus.publish(prompt(1))
        assert (again.seq, again.duplicate) == (2, False)

    run_virtual(main())


def test_an_acknowledgement_after_the_wait_still_settles() -> None:
    """As with JetStream: the work was done, whoever else has begun it too."""

    async def main() -> None:
        bus = await fresh(ack_wait_s=1.0)
        await bus.publish(prompt(1))
        async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
            [late] = await subscription.fetch(1, 1.0)
            await subscription.fetch(1, 2.0)
            await late.ack()
            assert await subscription.fetch(1, 5.0) == []

    run_virtual(main())


def test_a_full_stream_refuses() -> None:
    async def main() -> None:
        bus = await fresh()
        log = bus._hub.runs["run"].logs["prompts"]
        log.stream = dataclasses.replace(PROMPTS, bytes_max=500)
        results = await asyncio.gather(*(bus.publish(prompt(group)) for group in range(100)), return_exceptions=True)
        refused = [result for result in results if isinstance(result, BusFull)]
        stored = (await bus.info(PROMPTS)).messages
        assert len(refused) == 100 - stored > 0
        await bus.purge(PROMPTS, stored)
        assert (await bus.publish(prompt(1000))).seq == stored + 1

    run_virtual(main())


def test_a_replaced_partial_frees_its_bytes() -> None:
    async def main() -> None:
        bus = await fresh()
        await bus.publish(partial(1, 100))
        await bus.publish(partial(1, 1))
        entry = await bus.last(PARTIALS, "1-0")
        assert entry is not None
        assert (await bus.info(PARTIALS)).nbytes == len(entry.data)

    run_virtual(main())


def test_a_run_that_was_not_set_up_is_unavailable() -> None:
    async def main() -> None:
        bus = MemoryBus("nothing", MemoryHub())
        assert not await bus.exists()
        with pytest.raises(BusUnavailable):
            await bus.publish(prompt(1))

    run_virtual(main())


def test_a_reader_that_falls_behind_misses_nothing() -> None:
    async def main() -> list[int]:
        bus = await fresh()
        entries = bus.read(PROMPTS)
        for group in range(5):
            await bus.publish(prompt(group))
        first = await take(entries, 2)
        for group in range(5, 50):
            await bus.publish(prompt(group))
        return [entry.seq for entry in first + await take(entries, 48)]

    assert run_virtual(main()) == list(range(1, 51))


async def _busy(seed: int) -> list[tuple[float, str]]:
    """Three workers of random speed that die at random; what was stored, and when."""
    rng = random.Random(seed)
    bus = await fresh(ack_wait_s=2.0)
    queue = dataclasses.replace(ROLLOUT_WORKERS, ack_wait_s=2.0)
    stop = asyncio.Event()

    async def handle(message: Message, delivery: Any) -> list[Message]:
        await asyncio.sleep(rng.expovariate(2.0))
        return [rollout(delivery.entry.sample[0])]

    async def worker(name: str) -> None:
        while not stop.is_set():
            life = asyncio.create_task(serve(bus, queue, handle, room=lambda: 3, stop=stop, name=name))
            await asyncio.wait({life}, timeout=rng.uniform(1.0, 4.0))
            life.cancel()
            await asyncio.wait({life})

    workers = [asyncio.create_task(worker(f"w{n}")) for n in range(3)]
    for group in range(60):
        await bus.publish(prompt(group))
    while (backlog := await bus.backlog(queue)).pending or backlog.ack_pending:
        await asyncio.sleep(0.1)
    stop.set()
    await asyncio.gather(*workers)
    info = await bus.info(ROLLOUTS)
    return [(entry.time_s, entry.id) for entry in await bus.get(ROLLOUTS, range(1, info.last_seq + 1))]


def test_workers_that_die_at_random_finish_each_message_once() -> None:
    for seed in range(10):
        stored = run_virtual(_busy(seed))
        assert sorted(message_id for _, message_id in stored) == sorted(f"{group}-0" for group in range(60))


def test_a_seeded_run_repeats_exactly() -> None:
    """Or a failure found by the simulation could not be looked at again."""
    assert run_virtual(_busy(3)) == run_virtual(_busy(3))
    assert run_virtual(_busy(3)) != run_virtual(_busy(4))
