"""The one shell of all workers of a shared queue: fetch, decode, handle, publish all, and only then acknowledge."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import structlog

from bus.port import Bus, Delivery, Entry
from bus.table import DELIVERIES_MAX, Consumer
from schemas import Dropped, DropReason, MalformedMessage, Message, Partial, Rollout
from schemas.messages import Sample

FETCH_S = 1.0
FETCH_LATE_S = 5.0  # a fetch that hangs longer is given up and made anew
ROOM_LOOK_S = 0.1  # how soon room is noticed that appears without a message being finished
STOP_GRACE_S = 10.0  # for handlers to end by themselves, by handing back what they have
CANCEL_GRACE_S = 2.0
DONE_IDS_MAX = 4096
DETAIL_CHARS_MAX = 4000  # of `Dropped.detail`


@dataclasses.dataclass(frozen=True)
class HandBack:
    """An unfinished message: publish `outputs`, e.g. a `Partial`, then give it to another worker at once."""

    outputs: Sequence[Message] = ()


class Retry(Exception):
    """The message could not be handled now, by no fault of its own: give it out again after `delay_s`."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(f"again in {delay_s} s")
        self.delay_s = delay_s


class Rejected(Exception):
    """The message can never be handled: dead-letter it, and end its sample as `Dropped` with the reason `drop`."""

    def __init__(self, reason: str, drop: DropReason = "dead_letter") -> None:
        super().__init__(reason)
        self.reason = reason
        self.drop: DropReason = drop


Handle: TypeAlias = Callable[[Message, Delivery], Awaitable[Sequence[Message] | HandBack]]


async def serve(
    bus: Bus,
    consumer: Consumer,
    handle: Handle,
    *,
    room: Callable[[], int],
    stop: asyncio.Event,
    name: str,
    more: Callable[[Entry], Awaitable[int]] | None = None,
) -> None:
    """Serve a consumer until `stop` is set, then give back what is unfinished.

    Each message is handled in a task of its own, at most `room()` at a time, which may change, and acknowledged after
    its outputs are stored. In that order nothing is lost: a worker that dies between the two leaves the message with
    the log, which gives it out again, and since the ids of the outputs derive from those of the input, storing them
    twice stores them once. In the other order a death in between would lose the outputs for ever.

    A message that was given out more than `DELIVERIES_MAX` times is rejected: it may be what its workers die of. `more`
    tells how many deliveries beyond that one may have that came further each time; it is asked only then.

    While messages are handled, their progress is reported every third of the ack wait in force.

    Raises:
        BusUnavailable, BusFull: an output could not be stored. Everything in flight was given back.
        Exception: whatever else `handle` raised, our own bug. Everything in flight was given back.
    """
    shell = _Shell(bus, consumer, handle, name, more)
    async with bus.subscribe(consumer) as subscription:
        stopped = asyncio.ensure_future(stop.wait())
        ticking = asyncio.ensure_future(shell.tick())
        ticking.add_done_callback(shell.tick_ended)
        asked_for = 0  # messages that may still come
        try:
            while not stop.is_set() and not shell.failed.done():
                free = room() - len(shell.flights)
                if free < 1:
                    if asked_for:  # the room has shrunk: they are for whoever has some
                        await subscription.fetch(0, 0.0)
                        asked_for = 0
                    await _first_of(ROOM_LOOK_S, stopped, shell.failed, shell.next_end())
                    continue
                fetching = asyncio.ensure_future(subscription.fetch(free, FETCH_S))
                try:
                    await _first_of(FETCH_S + FETCH_LATE_S, fetching, stopped, shell.failed)
                finally:
                    if not fetching.done():
                        fetching.cancel()
                        await _first_of(CANCEL_GRACE_S, fetching)
                asked_for = free
                if fetching.done() and not fetching.cancelled():
                    asked_for -= len(fetching.result())
                    for delivery in fetching.result():
                        if stop.is_set():
                            await delivery.nak()
                        else:
                            shell.begin(delivery)
            until_s = asyncio.get_running_loop().time() + STOP_GRACE_S
            while shell.flights and not shell.failed.done():
                left_s = until_s - asyncio.get_running_loop().time()
                if left_s <= 0 or not await _first_of(left_s, shell.failed, shell.next_end()):
                    break
        finally:
            stopped.cancel()
            try:
                await shell.give_back()
            finally:  # or what is in flight would stay with a worker that has ended
                ticking.cancel()
        if shell.failed.done():
            shell.failed.result()


async def _first_of(timeout_s: float, *awaited: asyncio.Future[Any]) -> bool:
    """Wait until one of them is done; False if none was in time."""
    done, _ = await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


@dataclasses.dataclass(eq=False)
class _Flight:
    """A message being handled. `delivery` is the newest one of it, the one that can settle it."""

    delivery: Delivery
    task: asyncio.Task[None] | None = None


class _Shell:
    """What is in flight, and what becomes of it."""

    def __init__(
        self,
        bus: Bus,
        consumer: Consumer,
        handle: Handle,
        name: str,
        more: Callable[[Entry], Awaitable[int]] | None = None,
    ) -> None:
        self.flights: dict[int, _Flight] = {}  # by sequence
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # never has a result
        self._next_end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bus = bus
        self._consumer = consumer
        self._handle = handle
        self._more = more
        self._name = name
        self._done: OrderedDict[str, None] = OrderedDict()  # ids whose outputs are stored, the newest last
        self._log = structlog.get_logger().bind(worker=name, consumer=consumer.name)

    def next_end(self) -> asyncio.Future[None]:
        """Done when the next message is finished. One future for all: waiting for each task costs too much."""
        if self._next_end.done():
            self._next_end = asyncio.get_running_loop().create_future()
        return self._next_end

    def begin(self, delivery: Delivery) -> None:
        """Handle a delivery in a task, unless the same message is in flight already."""
        flight = self.flights.get(delivery.entry.seq)
        if flight is not None:  # the log gave it out again, e.g. since the server had forgotten: settle the newest
            flight.delivery = delivery
            return
        flight = self.flights[delivery.entry.seq] = _Flight(delivery)
        flight.task = asyncio.ensure_future(self._run(flight))

    async def tick(self) -> None:
        """Report progress of all that is in flight, every third of the ack wait, for ever."""
        ack_wait_s = (await self._bus.backlog(self._consumer)).ack_wait_s
        while True:
            await asyncio.sleep(ack_wait_s / 3)
            for flight in list(self.flights.values()):
                await flight.delivery.in_progress()

    def tick_ended(self, ticking: asyncio.Future[None]) -> None:
        """Without it all that is in flight would be given to others too: that ends the worker."""
        if not ticking.cancelled() and (error := ticking.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def give_back(self) -> None:
        """Cancel what is in flight and give it to other workers."""
        left = list(self.flights.values())
        tasks = [flight.task for flight in left if flight.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)
        for flight in left:
            await flight.delivery.nak()
        self.flights.clear()
        if self.failed.done():
            self.failed.exception()  # seen, even if something else ends the worker
        if left:
            self._log.info("messages_given_back", count=len(left))

    async def _run(self, flight: _Flight) -> None:
        seq = flight.delivery.entry.seq
        try:
            await self._settle(flight)
        except Exception as error:
            # It stays in flight, to be given back with the others.
            if not self.failed.done():
                self._log.error("worker_failed", message=flight.delivery.entry.id, seq=seq, error=repr(error))
                self.failed.set_exception(error)
            return
        self.flights.pop(seq, None)
        if not self._next_end.done():
            self._next_end.set_result(None)

    async def _settle(self, flight: _Flight) -> None:
        entry = flight.delivery.entry
        if entry.id in self._done:  # only the acknowledgement was lost
            self._done.move_to_end(entry.id)
            await flight.delivery.ack()
            return
        message: Message | None = None
        try:
            beyond = flight.delivery.deliveries - DELIVERIES_MAX
            if beyond > 0 and (self._more is None or beyond > await self._more(entry)):
                raise Rejected(f"gave up after {flight.delivery.deliveries - 1} deliveries")
            try:
                message = entry.message()
            except MalformedMessage as error:
                raise Rejected(error.reason) from None
            outcome = await self._handle(message, flight.delivery)
        except Retry as retry:
            await flight.delivery.nak(retry.delay_s)
            return
        except Rejected as rejected:
            await self._reject(flight, message, rejected)
            return
        try:
            for output in outcome.outputs if isinstance(outcome, HandBack) else outcome:
                await self._bus.publish(output)
        except MalformedMessage as error:  # such as too large: so it would be for every worker that is given it
            await self._reject(flight, message, Rejected(f"its result cannot be stored: {error.reason}"))
            return
        if isinstance(outcome, HandBack):
            await flight.delivery.nak()
            return
        if entry.id:
            self._done[entry.id] = None
            if len(self._done) > DONE_IDS_MAX:
                self._done.popitem(last=False)
        await flight.delivery.ack()

    async def _reject(self, flight: _Flight, message: Message | None, rejected: Rejected) -> None:
        """Keep the bytes and the reason, end the sample, and only then let go of the message."""
        entry = flight.delivery.entry
        self._log.warning("message_rejected", message=entry.id, seq=entry.seq, reason=rejected.reason)
        await self._bus.dead_letter(entry, rejected.reason)
        sample = (message.group_id, message.index) if isinstance(message, Sample) else entry.sample
        if sample is not None:
            tokens = len(message.tokens) if isinstance(message, Rollout | Partial) else 0
            if isinstance(message, Rollout):
                tokens -= int(message.observations[1::2].sum())
            detail = rejected.reason[:DETAIL_CHARS_MAX]
            await self._bus.publish(
                Dropped(
                    group_id=sample[0],
                    index=sample[1],
                    reason=rejected.drop,
                    tokens=tokens,
                    detail=detail,
                    worker=self._name,
                )
            )
        await flight.delivery.term()
