"""The bad way to a good log: one process's client of the in-memory log, across a network that delays, loses and cuts.

It behaves as the JetStream adapter does. What is sent arrives in the order of sending, also if its sender is killed
meanwhile. An unanswered request is repeated under the same id until its deadline, so its effect may happen twice.
Acknowledgements of deliveries are sent and not answered. Faults strike at each of these points.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

from bus.memory import MemoryBus
from bus.port import Ack, BusFull, BusUnavailable, ConsumerInfo, Delivery, Entry, Fenced, StreamInfo, Subscription
from bus.table import LEASES, PUBLISH_TIMEOUT_S, STREAM_OF, Consumer, Stream, progress_subject
from ops.sim.world import RUN, Process
from schemas import Batch, Message

T = TypeVar("T")

AGAIN_S: Final = 0.1  # between two tries
SLOW_S: Final = 2.0  # mean, of a slow call
LAG_S: Final = 0.3  # of a replica that lags
_UNANSWERED: Final = object()


class SimBus(MemoryBus):
    """See `bus.port.Bus`."""

    def __init__(self, process: Process) -> None:
        super().__init__(RUN, process.world.hub)
        self.process = process
        self.world = process.world
        self._arrived_s = 0.0  # when the last message sent so far arrives

    # ---- request and answer

    async def ask(self, what: str, effect: Callable[[], T]) -> T:
        """Have the server do something, at least once. Raises `BusUnavailable`, or what `effect` raises."""
        world, process = self.world, self.process
        until_s = world.loop.time() + world.scenario.deadline_s
        while True:
            await process.ready()
            fate = world.fate(process, "crash_before", "crash_after", "lost_answer", "slow_call")
            if fate == "crash_before":
                world.kill(process)
                await process.ready()
            answer = world.loop.create_future()
            if world.reaches(process):
                self.send(lambda answer=answer, fate=fate: self._serve(effect, answer, fate), slow=fate == "slow_call")  # type: ignore[misc]
                result = await answer
                await process.ready()
                if isinstance(result, BaseException):
                    raise result
                if result is not _UNANSWERED:
                    return result  # type: ignore[no-any-return]
                world.count("a request was repeated")
            if world.loop.time() > until_s:
                raise BusUnavailable(f"no answer to {what} within {world.scenario.deadline_s:.0f} s")
            await asyncio.sleep(AGAIN_S)

    def send(self, arrive: Callable[[], None], slow: bool = False) -> None:
        """Have a message arrive, after all that this process sent before."""
        delay_s = self.world.way_s(self.process)
        if slow:
            delay_s += self.process.dice("slow").expovariate(1 / SLOW_S)
        self._arrived_s = max(self._arrived_s, self.world.loop.time() + delay_s)
        self.world.loop.call_at(self._arrived_s, arrive)

    def _serve(self, effect: Callable[[], Any], answer: asyncio.Future[Any], fate: str) -> None:
        """At the server."""
        loop, process = self.world.loop, self.process
        result: Any = _UNANSWERED
        if self.world.reaches(process):
            if process.dead:
                self.world.count("a message arrived after its sender was killed")
            try:
                result = effect()
            except (Fenced, BusFull, BusUnavailable, LookupError) as error:
                result = error
        if fate == "crash_after":
            self.world.kill(process)
        if fate == "lost_answer":
            result = _UNANSWERED
        delay_s = PUBLISH_TIMEOUT_S if result is _UNANSWERED else self.world.way_s(process)
        loop.call_later(delay_s, self._answer, answer, result)

    def _answer(self, answer: asyncio.Future[Any], result: Any) -> None:
        if not answer.done():
            answer.set_result(result if self.world.reaches(self.process) else _UNANSWERED)

    # ---- bus.port.Bus

    async def publish(self, message: Message) -> Ack:
        """See `Bus.publish`."""
        return await self.ask(f"publish {message.id}", lambda: self._store(message))

    async def publish_fenced(self, messages: Sequence[Message], last_seq: int) -> int:
        """See `Bus.publish_fenced`."""
        for place, message in enumerate(messages, last_seq + 1):
            fate = self.world.fate(
                self.process, "stop_at_write", *(("die_at_batch",) if isinstance(message, Batch) else ())
            )
            if fate == "stop_at_write":
                self.world.stop_a_while(self.process)
            try:
                await self.ask(
                    f"publish {message.id} at {place}",
                    lambda message=message, place=place, fate=fate: self._decide(message, place, fate),  # type: ignore[misc]
                )
            except Fenced:
                self.world.count(f"fenced: {STREAM_OF[type(message)].name}")
                raise
        return last_seq + len(messages)

    def _decide(self, message: Message, place: int, fate: str) -> None:
        self._place(message, place)
        if fate == "die_at_batch":
            self.world.kill(self.process)

    async def dead_letter(self, entry: Entry, reason: str) -> None:
        """See `Bus.dead_letter`."""
        await self.ask("dead letter", lambda: self._bury(entry, reason))

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        """See `Bus.get`."""

        def effect() -> list[Entry]:
            log = self._log(stream)
            for seq in seqs:
                if seq not in log.entries:
                    raise LookupError(f"{stream.name} of run {self.run} holds nothing at sequence {seq}")
            return [log.entries[seq] for seq in seqs]

        return await self.ask(f"get {stream.name}", effect)

    async def last(self, stream: Stream, key: str = "") -> Entry | None:
        """See `Bus.last`. Any replica may answer, so it may be a little late."""

        def effect() -> Entry | None:
            if stream is LEASES:
                self._expire_leases()
            newest = self._log(stream).newest(key)
            if newest is None or not self.world.fate(self.process, "stale_read"):
                return newest
            self.world.count("a stale read")
            before_s = self.world.loop.time() - LAG_S
            older = (entry for entry in reversed(self._log(stream).entries.values()) if entry.time_s <= before_s)
            return next((entry for entry in older if not key or entry.key == key), None)

        return await self.ask(f"last {stream.name}", effect)

    async def first(self, stream: Stream, key: str) -> Entry | None:
        """See `Bus.first`. A replica that lags may not have it yet."""

        def effect() -> Entry | None:
            oldest = self._log(stream).oldest(key)
            if oldest is None or not self.world.fate(self.process, "stale_read"):
                return oldest
            self.world.count("a stale read")
            return oldest if oldest.time_s <= self.world.loop.time() - LAG_S else None

        return await self.ask(f"first {stream.name}", effect)

    async def info(self, stream: Stream) -> StreamInfo:
        """See `Bus.info`."""

        def effect() -> StreamInfo:
            log = self._log(stream)
            return StreamInfo(next(iter(log.entries), log.last_seq + 1), log.last_seq, len(log.entries), log.nbytes)

        return await self.ask(f"info {stream.name}", effect)

    async def backlog(self, consumer: Consumer) -> ConsumerInfo:
        """See `Bus.backlog`."""
        return await self.ask(f"backlog {consumer.name}", lambda: self._backlog(consumer))

    async def acquire(self, name: str, holder: str, ttl_s: float) -> int | None:
        """See `Bus.acquire`."""
        return await self.renew(name, holder, 0, ttl_s)

    async def renew(self, name: str, holder: str, revision: int, ttl_s: float) -> int | None:
        """See `Bus.renew`. A lease is ours, too, if only the answer to an earlier try was lost."""
        taken: list[int] = []

        def effect() -> int | None:
            if taken and (now := self._log(LEASES).newest(name)) is not None and now.seq == taken[-1]:
                return now.seq
            got = self._lease(name, holder, revision, ttl_s)
            if got is not None:
                taken.append(got)
            return got

        return await self.ask(f"lease {name}", effect)

    async def release(self, name: str, revision: int) -> None:
        """See `Bus.release`."""
        await self.ask(f"release {name}", lambda: self._log(LEASES).remove(revision))

    async def beat(self, gauges: Mapping[str, Any]) -> None:
        """See `Bus.beat`: nobody listens."""
        await self.process.ready()

    async def tell(self, listener: str, what: Mapping[str, Any]) -> None:
        """See `Bus.tell`: lost if either end is cut off."""
        await self.process.ready()
        if self.world.reaches(self.process):
            self.world.loop.call_later(self.world.way_s(self.process), self._tell, listener, what)

    def _tell(self, listener: str, what: Mapping[str, Any]) -> None:
        self._spread(progress_subject(self.run, listener), what)

    async def told(self, listener: str) -> AsyncIterator[dict[str, Any]]:
        """See `Bus.told`."""
        async for what in self._heard(progress_subject(self.run, listener)):
            await self.process.ready()
            if self.world.reaches(self.process):
                yield what

    async def read(self, stream: Stream, start: int = 1) -> AsyncIterator[Entry]:
        """See `Bus.read`: in order, and late."""
        log, seq = self._log(stream), max(start, 1)
        while True:
            await self.process.ready()
            if not self.world.reaches(self.process):
                await asyncio.sleep(AGAIN_S)
                continue
            entries = [entry for at in range(seq, log.last_seq + 1) if (entry := log.entries.get(at)) is not None]
            seq = max(seq, log.last_seq + 1)
            if entries:
                await asyncio.sleep(self.world.way_s(self.process))
                await self._connected()
            for entry in entries:
                yield entry
            if seq > log.last_seq:
                await log.changed.wait()

    def subscribe(self, consumer: Consumer) -> Subscription:
        """See `Bus.subscribe`."""
        return _Subscription(self, consumer)

    async def _connected(self) -> None:
        await self.process.ready()
        while not self.world.reaches(self.process):
            await asyncio.sleep(AGAIN_S)
            await self.process.ready()


class _Delivery:
    """See `bus.port.Delivery`. Each answer is one message on its way, which may be lost."""

    def __init__(self, bus: SimBus, inner: Delivery) -> None:
        self.entry = inner.entry
        self.deliveries = inner.deliveries
        self._bus = bus
        self._inner = inner

    async def ack(self) -> None:
        await self._answer("ack", self._inner.ack)

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._answer("nak", lambda: self._inner.nak(delay_s))

    async def term(self) -> None:
        await self._answer("term", self._inner.term)

    async def in_progress(self) -> None:
        await self._answer("in_progress", self._inner.in_progress)

    async def _answer(self, what: str, effect: Callable[[], Any]) -> None:
        bus, world = self._bus, self._bus.world
        await bus.process.ready()
        fate = world.fate(bus.process, "crash_before", "crash_after", "lost_ack")
        if fate == "crash_before":
            world.kill(bus.process)
            await bus.process.ready()

        def arrive() -> None:
            if world.reaches(bus.process) and fate != "lost_ack":
                world.note(f"{what} {self.entry.stream.name} {self.entry.seq}")
                _run_now(effect())
                if what == "ack":
                    world.on_acknowledged(self.entry)

        if world.reaches(bus.process):
            bus.send(arrive)
        if fate == "crash_after":
            world.kill(bus.process)
            await bus.process.ready()


def _run_now(work: Any) -> None:
    """Run a coroutine that never waits."""
    with contextlib.suppress(StopIteration):
        work.send(None)
        raise AssertionError("the in-memory log settles at once")


class _Subscription:
    """See `bus.port.Subscription`. What comes for a fetch that was given up is kept for the next."""

    def __init__(self, bus: SimBus, consumer: Consumer) -> None:
        self._bus = bus
        self._queue = bus._queue(consumer)
        self._came: deque[Delivery] = deque()
        self._asked = 0  # deliveries on their way
        self._arrived: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        while self._came:
            await self._came.pop().nak()

    async def fetch(self, most: int, timeout_s: float) -> list[Delivery]:
        """See `bus.port.Subscription.fetch`."""
        loop, world, process = self._bus.world.loop, self._bus.world, self._bus.process
        until_s = loop.time() + timeout_s
        while True:
            await process.ready()
            room = most - len(self._came) - self._asked
            if room > 0 and world.reaches(process):
                self._take(room)
            left_s = until_s - loop.time()
            if self._came or left_s <= 0:
                break
            if self._asked:
                self._arrived = loop.create_future()
                await self._arrived
            elif not world.reaches(process):
                await asyncio.sleep(min(left_s, AGAIN_S))
            else:
                due_s = self._queue.next_due_s()
                await self._queue.changed.wait(left_s if due_s is None else min(left_s, max(0.0, due_s - loop.time())))
        return [self._came.popleft() for _ in range(min(most, len(self._came)))]

    def _take(self, most: int) -> None:
        """At the server: give out what is there."""
        world, process, queue = self._bus.world, self._bus.process, self._queue
        taken: list[Delivery] = list(queue.take(most))
        if not taken:
            return
        for delivery in taken:
            world.note(f"gave {delivery.entry.stream.name} {delivery.entry.seq} time {delivery.deliveries}")
            if delivery.deliveries > 1:
                world.count("a message was given out again")
            if world.fate(process, "duplicate"):
                queue.delay(delivery.entry.seq, delivery.deliveries, process.dice("again").uniform(0.0, 0.5))
        if len(taken) > 1 and world.fate(process, "reorder"):
            process.dice("order").shuffle(taken)
        self._asked += len(taken)
        world.loop.call_later(world.way_s(process), self._receive, taken)

    def _receive(self, taken: list[Delivery]) -> None:
        self._asked -= len(taken)
        if self._bus.world.reaches(self._bus.process) and not self._bus.process.dead:
            for delivery in taken:
                self._bus.world.on_given(self._bus.process, delivery.entry)
            self._came.extend(_Delivery(self._bus, delivery) for delivery in taken)
        else:
            self._bus.world.count("a delivery was lost on its way")
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
