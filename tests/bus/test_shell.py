"""The shell on the log in memory: what happens to a message when a handler succeeds, fails, hands back, or dies."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from bus.memory import MemoryBus, MemoryHub
from bus.port import BusFull, Delivery
from bus.shell import HandBack, Handle, Rejected, Retry, serve
from bus.table import DEAD, DELIVERIES_MAX, DROPPED, PARTIALS, ROLLOUT_WORKERS, ROLLOUTS
from schemas import Dropped, MalformedMessage, Message, Prompt
from tests.bus.samples import partial, prompt, rollout

ACK_WAIT_S = 0.15
QUEUE = ROLLOUT_WORKERS


async def new_bus(ack_wait_s: float) -> MemoryBus:
    bus = MemoryBus("shell", MemoryHub())
    await bus.setup(ack_wait_s=ack_wait_s)
    return bus


@pytest.fixture
async def bus() -> MemoryBus:
    return await new_bus(ACK_WAIT_S)


@contextlib.asynccontextmanager
async def serving(bus: MemoryBus, handle: Handle, room: int = 4, name: str = "w") -> AsyncIterator[asyncio.Event]:
    """A worker that runs inside the block, and is stopped at its end."""
    stop = asyncio.Event()
    worker = asyncio.create_task(serve(bus, QUEUE, handle, room=lambda: room, stop=stop, name=name))
    try:
        yield stop
    finally:
        stop.set()
        async with asyncio.timeout(20):
            await worker


async def until(condition: Any, wait_s: float = 20.0) -> None:
    async with asyncio.timeout(wait_s):
        while not await condition():
            await asyncio.sleep(0.005)


def settled(bus: MemoryBus) -> Any:
    async def is_settled() -> bool:
        backlog = await bus.backlog(QUEUE)
        return backlog.pending == 0 and backlog.ack_pending == 0

    return is_settled


async def messages(bus: MemoryBus, stream: Any) -> int:
    return (await bus.info(stream)).messages


async def answer(message: Message, delivery: Delivery) -> Sequence[Message]:
    assert isinstance(message, Prompt)
    return [rollout(message.group_id, message.index)]


async def test_a_message_is_acknowledged_after_its_outputs_are_stored(bus: MemoryBus) -> None:
    """The order on which every recovery rests."""
    order: list[str] = []
    publish = bus.publish

    async def recording_publish(message: Message) -> Any:
        ack = await publish(message)
        order.append(f"stored {message.TYPE}, {(await bus.backlog(QUEUE)).ack_pending} unacknowledged")
        return ack

    await bus.publish(prompt(1))
    bus.publish = recording_publish  # type: ignore[method-assign]
    async with serving(bus, answer):
        await until(settled(bus))
    assert order == ["stored rollout, 1 unacknowledged"]


async def test_no_more_than_room_is_handled_at_once(bus: MemoryBus) -> None:
    busy = 0
    most = 0

    async def slow(message: Message, delivery: Delivery) -> Sequence[Message]:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.005)
        busy -= 1
        return await answer(message, delivery)

    for group in range(30):
        await bus.publish(prompt(group))
    async with serving(bus, slow, room=3):
        await until(settled(bus))
    assert most == 3
    assert await messages(bus, ROLLOUTS) == 30


async def test_what_was_asked_for_is_withdrawn_when_the_room_shrinks(bus: MemoryBus) -> None:
    """Else it lies with a worker that cannot begin it, while another could."""
    room, asked = 4, []

    async def never(message: Message, delivery: Delivery) -> Sequence[Message]:
        nonlocal room
        room = 1
        await asyncio.Event().wait()
        return []

    class Recording(MemoryBus):
        def subscribe(self, consumer: Any) -> Any:
            subscription = super().subscribe(consumer)
            fetch = subscription.fetch

            async def recorded(most: int, timeout_s: float) -> Any:
                asked.append(most)
                return await fetch(most, timeout_s)

            subscription.fetch = recorded  # type: ignore[method-assign]
            return subscription

    await bus.publish(prompt(1))
    worker = asyncio.create_task(
        serve(Recording("shell", bus._hub), QUEUE, never, room=lambda: room, stop=asyncio.Event(), name="w")
    )
    try:
        async with asyncio.timeout(5):
            while 0 not in asked:
                assert not worker.done(), worker.exception()
                await asyncio.sleep(0.01)
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    assert asked == [4, 3, 0]


async def test_a_straggler_holds_up_nobody(bus: MemoryBus) -> None:
    released = asyncio.Event()

    async def slow_first(message: Message, delivery: Delivery) -> Sequence[Message]:
        if message.id == "0-0":
            await released.wait()
        return await answer(message, delivery)

    for group in range(20):
        await bus.publish(prompt(group))
    async with serving(bus, slow_first, room=2):

        async def others_done() -> bool:
            return await messages(bus, ROLLOUTS) == 19

        await until(others_done)
        released.set()
        await until(settled(bus))


async def test_a_long_handler_keeps_its_message(bus: MemoryBus) -> None:
    """Several ack waits long: without the ticks the prompt would be generated twice."""
    calls = 0

    async def long(message: Message, delivery: Delivery) -> Sequence[Message]:
        nonlocal calls
        calls += 1
        await asyncio.sleep(4 * ACK_WAIT_S)
        return await answer(message, delivery)

    await bus.publish(prompt(1))
    async with serving(bus, long):
        await until(settled(bus))
    assert calls == 1


async def test_a_death_between_storing_and_acknowledging_makes_no_duplicate(bus: MemoryBus) -> None:
    """The output is written again under the same id, and the log drops it."""

    await bus.publish(prompt(1))
    async with bus.subscribe(QUEUE) as subscription:
        [delivery] = await subscription.fetch(1, 1.0)
        [output] = await answer(delivery.entry.message(), delivery)
        await bus.publish(output)  # and here the worker dies, without the acknowledgement
    async with serving(bus, answer):
        await until(settled(bus))
    assert await messages(bus, ROLLOUTS) == 1


async def test_a_message_whose_acknowledgement_was_forgotten_is_not_handled_again(bus: MemoryBus) -> None:
    """A restarted server forgets the last acknowledgements; generating those answers again would be waste."""
    await bus.publish(prompt(1))
    lossy, counting = _AcksLost(bus), _Counting()
    async with serving(lossy, counting):  # type: ignore[arg-type]
        await until(settled(bus))
    assert lossy.acks_lost == 1
    assert counting.calls == 1
    assert await messages(bus, ROLLOUTS) == 1


class _Counting:
    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, message: Message, delivery: Delivery) -> Sequence[Message]:
        self.calls += 1
        return await answer(message, delivery)


class _AcksLost:
    """A bus that loses the first acknowledgement."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self.acks_lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    def subscribe(self, consumer: Any) -> Any:
        outer, subscription = self, self._bus.subscribe(consumer)
        fetch = subscription.fetch

        async def lossy_fetch(most: int, timeout_s: float) -> list[Any]:
            return [_LossyDelivery(outer, delivery) for delivery in await fetch(most, timeout_s)]

        subscription.fetch = lossy_fetch  # type: ignore[method-assign]
        return subscription


class _LossyDelivery:
    def __init__(self, outer: _AcksLost, delivery: Delivery) -> None:
        self._outer = outer
        self._delivery = delivery

    def __getattr__(self, name: str) -> Any:
        return getattr(self._delivery, name)

    async def ack(self) -> None:
        if self._outer.acks_lost:
            await self._delivery.ack()
        else:
            self._outer.acks_lost += 1


async def test_a_message_given_out_again_while_in_flight_is_handled_once(bus: MemoryBus) -> None:
    calls = 0

    async def expiring(message: Message, delivery: Delivery) -> Sequence[Message]:
        nonlocal calls
        calls += 1
        await delivery.nak()  # the log believes that we lost it
        await asyncio.sleep(0.1)
        return await answer(message, delivery)

    await bus.publish(prompt(1))
    async with serving(bus, expiring):
        await until(settled(bus))
    assert calls == 1


async def test_retry_gives_the_message_out_again_later(bus: MemoryBus) -> None:
    seen: list[int] = []

    async def flaky(message: Message, delivery: Delivery) -> Sequence[Message]:
        seen.append(delivery.deliveries)
        if delivery.deliveries < 3:
            raise Retry(0.02)
        return await answer(message, delivery)

    await bus.publish(prompt(1))
    async with serving(bus, flaky):
        await until(settled(bus))
    assert seen == [1, 2, 3]
    assert await messages(bus, ROLLOUTS) == 1


async def test_a_rejected_message_leaves_its_bytes_and_ends_its_sample(bus: MemoryBus) -> None:
    """Nothing lost: the sample has a terminal record, and a person can see what it was."""

    async def reject(message: Message, delivery: Delivery) -> Sequence[Message]:
        raise Rejected("the template has no user turn", "bad_prompt")

    await bus.publish(prompt(4, 2))
    async with serving(bus, reject):
        await until(settled(bus))
    [dead] = await bus.get(DEAD, [1])
    assert dead.message() == prompt(4, 2)
    assert dead.headers["Rs-Reason"] == "the template has no user turn"
    [dropped] = await bus.get(DROPPED, [1])
    assert dropped.message() == Dropped(
        group_id=4, index=2, reason="bad_prompt", detail="the template has no user turn", worker="w"
    )


async def test_a_message_that_does_not_decode_ends_its_sample_by_its_header(bus: MemoryBus) -> None:
    class Broken(Prompt):
        """A prompt of a program from the future: its bytes say so."""

        TYPE_VERSION = 99

    broken = Broken(group_id=7, index=1, group_size=8, prompt="", task={}, seed=0, min_version=0)
    log = bus._hub.runs["shell"].logs["prompts"]
    log.store("", b"\x93\xa6prompt\x63\x80", {"Nats-Msg-Id": broken.id})
    async with serving(bus, answer):
        await until(settled(bus))
    assert await messages(bus, ROLLOUTS) == 0
    [dead] = await bus.get(DEAD, [1])
    assert "version 99" in dead.headers["Rs-Reason"]
    [dropped] = await bus.get(DROPPED, [1])
    message = dropped.message()
    assert isinstance(message, Dropped)
    assert (message.sample_id, message.reason) == ("7-1", "dead_letter")


async def test_a_message_that_kills_every_worker_is_given_up(bus: MemoryBus) -> None:
    await bus.publish(prompt(1))
    async with bus.subscribe(QUEUE) as subscription:
        for _ in range(DELIVERIES_MAX):
            [delivery] = await subscription.fetch(1, 1.0)
            await delivery.nak()
    async with serving(bus, answer):
        await until(settled(bus))
    assert await messages(bus, ROLLOUTS) == 0
    [dead] = await bus.get(DEAD, [1])
    assert dead.headers["Rs-Reason"] == f"gave up after {DELIVERIES_MAX} deliveries"
    assert await messages(bus, DROPPED) == 1


async def test_a_message_handed_back_goes_on_at_another_worker_at_once() -> None:
    """A worker that is told to leave publishes the prefix and lets another resume it; nobody waits for the ack wait."""
    bus = await new_bus(ack_wait_s=600.0)

    async def leaving(message: Message, delivery: Delivery) -> HandBack:
        await leave.wait()
        return HandBack([partial(1, 5)])

    leave = asyncio.Event()
    await bus.publish(prompt(1))
    async with serving(bus, leaving, name="leaves") as stop:
        await asyncio.sleep(0.02)
        stop.set()
        leave.set()
    assert await messages(bus, PARTIALS) == 1
    assert (await bus.backlog(QUEUE)).ack_pending == 1
    async with serving(bus, answer, name="resumes"):
        await until(settled(bus))
    assert await messages(bus, ROLLOUTS) == 1


async def test_a_worker_that_is_cancelled_while_it_gives_back_reports_no_more_progress(bus: MemoryBus) -> None:
    """Else its messages would stay with it for as long as the process lives. Found by simulation."""
    begun = asyncio.Event()

    async def stubborn(message: Message, delivery: Delivery) -> Sequence[Message]:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
        return []

    await bus.publish(prompt(1))
    worker = asyncio.create_task(serve(bus, QUEUE, stubborn, room=lambda: 1, stop=asyncio.Event(), name="w"))
    await begun.wait()
    for _ in range(2):
        worker.cancel()
        await asyncio.sleep(0.01)
    await asyncio.wait([worker])
    async with serving(bus, answer, name="another"):
        await until(settled(bus))
    assert await messages(bus, ROLLOUTS) == 1


async def test_stop_takes_no_new_message_and_waits_for_those_in_flight(bus: MemoryBus) -> None:
    started = asyncio.Event()

    async def slow(message: Message, delivery: Delivery) -> Sequence[Message]:
        started.set()
        await asyncio.sleep(0.05)
        return await answer(message, delivery)

    for group in range(5):
        await bus.publish(prompt(group))
    async with serving(bus, slow, room=1) as stop:
        await started.wait()
        stop.set()
    assert await messages(bus, ROLLOUTS) == 1
    backlog = await bus.backlog(QUEUE)
    assert (backlog.pending, backlog.ack_pending) == (4, 0)


async def test_a_handler_that_ignores_stop_is_cancelled_and_its_message_given_back(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bus.shell.STOP_GRACE_S", 0.05)
    started = asyncio.Event()

    async def stubborn(message: Message, delivery: Delivery) -> Sequence[Message]:
        started.set()
        await asyncio.sleep(60)
        return []

    await bus.publish(prompt(1))
    async with serving(bus, stubborn) as stop:
        await started.wait()
        stop.set()
    async with bus.subscribe(QUEUE) as subscription:
        [again] = await subscription.fetch(1, ACK_WAIT_S / 2)
        assert again.deliveries == 2


async def test_our_own_bug_ends_the_worker_loudly_and_gives_everything_back(bus: MemoryBus) -> None:
    """A worker that swallowed its bugs would turn them into missing data."""

    async def buggy(message: Message, delivery: Delivery) -> Sequence[Message]:
        if message.id == "2-0":
            await asyncio.sleep(0.02)
            raise KeyError("oops")
        await asyncio.sleep(60)
        return []

    for group in range(3):
        await bus.publish(prompt(group))
    with pytest.raises(KeyError, match="oops"):
        async with asyncio.timeout(20):
            await serve(bus, QUEUE, buggy, room=lambda: 3, stop=asyncio.Event(), name="w")
    async with bus.subscribe(QUEUE) as subscription:
        assert len(await subscription.fetch(5, ACK_WAIT_S / 2)) == 3


async def test_an_invalid_output_is_our_bug_and_not_the_fault_of_the_input(bus: MemoryBus) -> None:
    async def buggy(message: Message, delivery: Delivery) -> Sequence[Message]:
        return [dataclasses.replace(rollout(1), segments=[(1, 1)])]

    await bus.publish(prompt(1))
    with pytest.raises(MalformedMessage):
        async with asyncio.timeout(20):
            await serve(bus, QUEUE, buggy, room=lambda: 3, stop=asyncio.Event(), name="w")
    assert await messages(bus, DEAD) == 0


async def test_a_full_log_ends_the_worker_and_loses_nothing(bus: MemoryBus) -> None:
    log = bus._hub.runs["shell"].logs["rollouts"]
    log.stream = dataclasses.replace(ROLLOUTS, bytes_max=10)
    await bus.publish(prompt(1))
    with pytest.raises(BusFull):
        async with asyncio.timeout(20):
            await serve(bus, QUEUE, answer, room=lambda: 3, stop=asyncio.Event(), name="w")
    log.stream = ROLLOUTS
    async with serving(bus, answer):
        await until(settled(bus))
    assert await messages(bus, ROLLOUTS) == 1


async def test_several_outputs_are_all_stored(bus: MemoryBus) -> None:
    async def two(message: Message, delivery: Delivery) -> Sequence[Message]:
        return [rollout(1), partial(1, 3)]

    await bus.publish(prompt(1))
    async with serving(bus, two):
        await until(settled(bus))
    assert await messages(bus, ROLLOUTS) == 1
    assert await messages(bus, PARTIALS) == 1


async def test_a_cancelled_worker_gives_back_what_it_has(bus: MemoryBus) -> None:
    async def slow(message: Message, delivery: Delivery) -> Sequence[Message]:
        await asyncio.sleep(60)
        return []

    await bus.publish(prompt(1))
    worker = asyncio.create_task(serve(bus, QUEUE, slow, room=lambda: 3, stop=asyncio.Event(), name="w"))
    await asyncio.sleep(0.02)
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
    async with bus.subscribe(QUEUE) as subscription:
        assert len(await subscription.fetch(5, ACK_WAIT_S / 2)) == 1
