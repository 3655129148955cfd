"""The log in memory: the adapter of `bus.port.Bus` for tests and for the simulation in virtual time.

It keeps JetStream's promises and adds none: messages come again after `ack_wait_s`, repeated ids are dropped within the
window only, a full stream refuses. Time is the event loop's, order is that of the calls: a seeded run repeats exactly.
The way to this log is perfect; `ops.sim.network` puts a bad one in front of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

from bus.port import (
    ID_HEADER,
    RUN_HEADER,
    WRITER_HEADER,
    Ack,
    BusFull,
    BusUnavailable,
    ConsumerInfo,
    Delivery,
    Entry,
    Fenced,
    StreamInfo,
    Subscription,
    dead_letter_headers,
    headers_of,
    key_of,
)
from bus.table import (
    CONSUMERS,
    DEAD,
    DEDUPE_WINDOW_S,
    LEASE_MIN_S,
    LEASES,
    STREAM_OF,
    STREAMS,
    Consumer,
    Stream,
    beats_subject,
    check_run_name,
    progress_subject,
)
from schemas import Message, encode

BEATS_MAX = 1000
SETTLED_MAX = 1000  # settled deliveries that a queue could still forget


class _Signal:
    """Wakes everybody who waits, in the order in which they began to."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the next `notify`, or for the time to pass."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        timer = loop.call_later(timeout_s, _finish, waiter) if timeout_s is not None else None
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def notify(self) -> None:
        """Wake all."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _finish(waiter)


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _Log:
    """One stream: its entries, and the ids of the hub's last `dedupe_window_s`."""

    def __init__(self, stream: Stream, hub: MemoryHub) -> None:
        self.stream = stream
        self._hub = hub
        self.entries: dict[int, Entry] = {}  # in order of their sequences, as all dicts are in order of insertion
        self.last_seq = 0
        self.nbytes = 0
        self.changed = _Signal()
        self._by_key: dict[str, int] = {}
        self._firsts: dict[str, int] = {}
        self._ids: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def store(self, key: str, data: bytes, headers: dict[str, str], expected: int | None = None) -> Ack:
        """Append, in JetStream's order of checks: the expected sequence, the id, the room."""
        now_s = asyncio.get_running_loop().time()
        if expected is not None and expected != self.last_seq:
            raise Fenced(f"{self.stream.name} ends at {self.last_seq}, not at {expected}")
        while self._ids and next(iter(self._ids.values()))[0] <= now_s - self._hub.dedupe_window_s:
            self._ids.popitem(last=False)
        message_id = headers.get(ID_HEADER, "")
        if message_id in self._ids:
            return Ack(self._ids[message_id][1], duplicate=True)
        if self.stream.name in self._hub.full or self.nbytes + len(data) > self.stream.bytes_max:
            raise BusFull(f"The stream {self.stream.name} is full ({self.stream.bytes_max} bytes). Nothing was lost.")
        self.last_seq += 1
        if message_id:
            self._ids[message_id] = now_s, self.last_seq
        if self.stream.newest_only and key in self._by_key:
            self.remove(self._by_key[key])
        self._by_key[key] = self.last_seq
        self._firsts.setdefault(key, self.last_seq)
        entry = self.entries[self.last_seq] = Entry(self.stream, self.last_seq, key, headers, data, now_s)
        self.nbytes += len(data)
        self._hub.on_stored(entry)
        self.changed.notify()
        return Ack(self.last_seq)

    def remove(self, seq: int) -> None:
        """Delete one entry, the oldest of its key, if it is there."""
        entry = self.entries.pop(seq, None)
        if entry is not None:
            self.nbytes -= len(entry.data)
            if self._by_key[entry.key] == seq:
                del self._by_key[entry.key], self._firsts[entry.key]
            else:
                self._firsts[entry.key] = next(at for at, left in self.entries.items() if left.key == entry.key)

    def oldest(self, key: str) -> Entry | None:
        """The oldest entry of a key."""
        seq = self._firsts.get(key)
        return self.entries.get(seq) if seq is not None else None

    def newest(self, key: str) -> Entry | None:
        """The newest entry; of one key, if that is given."""
        seq = self._by_key.get(key) if key else next(reversed(self.entries), None)
        return self.entries.get(seq) if seq is not None else None


@dataclasses.dataclass(slots=True)
class _Given:
    """A delivery that is not settled. `due_s`: when it is given out again; `waiting`: for its delay, with nobody."""

    due_s: float
    deliveries: int


class _Queue:
    """A durable consumer: what was given out, and what comes next."""

    def __init__(self, log: _Log, ack_wait_s: float, ack_pending_max: int) -> None:
        self.log = log
        self.ack_wait_s = ack_wait_s
        self.ack_pending_max = ack_pending_max
        self.next_seq = 1
        self.given: dict[int, _Given] = {}
        self.changed = _Signal()
        self._due: list[tuple[float, int]] = []  # a heap; may hold times that a later call moved
        self._settled: deque[tuple[float, int, int]] = deque(maxlen=SETTLED_MAX)  # when, sequence, deliveries

    def take(self, most: int) -> list[_MemoryDelivery]:
        """Up to `most` deliveries: first what is due again, then new ones."""
        now_s = asyncio.get_running_loop().time()
        out: list[_MemoryDelivery] = []
        while len(out) < most and self._due and self._due[0][0] <= now_s:
            due_s, seq = heapq.heappop(self._due)
            given = self.given.get(seq)
            if given is None or given.due_s != due_s:
                continue
            if seq not in self.log.entries:  # purged meanwhile
                del self.given[seq]
                continue
            given.deliveries += 1
            out.append(self._give(seq, given))
        while len(out) < most and self.next_seq <= self.log.last_seq and len(self.given) < self.ack_pending_max:
            seq, self.next_seq = self.next_seq, self.next_seq + 1
            if seq in self.log.entries:
                self.given[seq] = _Given(0.0, 1)
                out.append(self._give(seq, self.given[seq]))
        return out

    def next_due_s(self) -> float | None:
        """When something may be due again."""
        return self._due[0][0] if self._due else None

    def delay(self, seq: int, deliveries: int, delay_s: float) -> None:
        """Give an entry out again after `delay_s`, unless it is settled or was given out again meanwhile."""
        given = self.given.get(seq)
        if given is not None and given.deliveries == deliveries:
            given.due_s = asyncio.get_running_loop().time() + delay_s
            heapq.heappush(self._due, (given.due_s, seq))
            self.changed.notify()

    def settle(self, seq: int) -> None:
        """Never give it out again, unless that is forgotten."""
        if (given := self.given.pop(seq, None)) is not None:
            self._settled.append((asyncio.get_running_loop().time(), seq, given.deliveries))
            self.changed.notify()

    def forget_since(self, time_s: float) -> int:
        """Forget what was settled since then, as a server does that was killed; returns how many come again."""
        now_s, forgotten = asyncio.get_running_loop().time(), 0
        while self._settled and self._settled[-1][0] >= time_s:
            _, seq, deliveries = self._settled.pop()
            if seq in self.log.entries:
                self.given[seq] = _Given(now_s, deliveries)
                heapq.heappush(self._due, (now_s, seq))
                forgotten += 1
        self.changed.notify()
        return forgotten

    def _give(self, seq: int, given: _Given) -> _MemoryDelivery:
        given.due_s = asyncio.get_running_loop().time() + self.ack_wait_s
        heapq.heappush(self._due, (given.due_s, seq))
        return _MemoryDelivery(self, self.log.entries[seq], given.deliveries)


class _MemoryDelivery:
    """See `bus.port.Delivery`."""

    __slots__ = ("_queue", "deliveries", "entry")

    def __init__(self, queue: _Queue, entry: Entry, deliveries: int) -> None:
        self.entry = entry
        self.deliveries = deliveries
        self._queue = queue

    async def ack(self) -> None:
        self._queue.settle(self.entry.seq)

    async def nak(self, delay_s: float = 0.0) -> None:
        self._queue.delay(self.entry.seq, self.deliveries, delay_s)

    async def term(self) -> None:
        self._queue.settle(self.entry.seq)

    async def in_progress(self) -> None:
        self._queue.delay(self.entry.seq, self.deliveries, self._queue.ack_wait_s)


class _MemorySubscription:
    """See `bus.port.Subscription`. It asks for messages only during a fetch, so it never holds any between them."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def fetch(self, most: int, timeout_s: float) -> list[Delivery]:
        """Up to `most` deliveries; see `bus.port.Subscription.fetch`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        await asyncio.sleep(0)
        while not (taken := self._queue.take(most)) and (left_s := until_s - loop.time()) > 0:
            due_s = self._queue.next_due_s()
            await self._queue.changed.wait(left_s if due_s is None else min(left_s, max(0.0, due_s - loop.time())))
        return list(taken)


class _Run:
    """The streams, consumers and leases of one run."""

    def __init__(self, ack_wait_s: float | None, hub: MemoryHub) -> None:
        self.logs = {stream.name: _Log(stream, hub) for stream in STREAMS}
        self.queues: dict[str, _Queue] = {}
        for consumer in CONSUMERS:
            log = self.logs[consumer.stream.name]
            self.queues[consumer.name] = _Queue(log, ack_wait_s or consumer.ack_wait_s, consumer.ack_pending_max)
        self.lease_ends_s: dict[int, float] = {}  # by revision


class MemoryHub:
    """What the server is to JetStream: holds the runs that `MemoryBus` clients share.

    Streams named in `full` refuse, whatever they hold. `on_stored` is told of each entry as it is stored.
    """

    def __init__(
        self, dedupe_window_s: float = DEDUPE_WINDOW_S, on_stored: Callable[[Entry], None] = lambda entry: None
    ) -> None:
        self.dedupe_window_s = dedupe_window_s
        self.on_stored = on_stored
        self.full: set[str] = set()
        self.runs: dict[str, _Run] = {}
        self.writers = 0  # clients so far
        self.listeners: dict[str, list[asyncio.Queue[dict[str, Any]]]] = defaultdict(list)


class MemoryBus:
    """One client's view of a run in a hub; see `bus.port.Bus` for what each method promises."""

    def __init__(self, run: str, hub: MemoryHub) -> None:
        self.run = check_run_name(run)
        self._hub = hub
        hub.writers += 1
        self._writer = f"writer-{hub.writers}"

    async def connect(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to close."""

    async def setup(self, ack_wait_s: float | None = None, replicas: int = 1) -> None:
        """Create the run's streams and consumers, or leave them as they are."""
        if self.run not in self._hub.runs:
            self._hub.runs[self.run] = _Run(ack_wait_s, self._hub)

    async def exists(self) -> bool:
        """Whether the run has been set up in this hub."""
        return self.run in self._hub.runs

    async def publish(self, message: Message) -> Ack:
        """Store a message under its id."""
        await asyncio.sleep(0)
        return self._store(message)

    async def publish_fenced(self, messages: Sequence[Message], last_seq: int) -> int:
        """Store messages in order directly after `last_seq`; returns the new last sequence."""
        for place, message in enumerate(messages, last_seq + 1):
            await asyncio.sleep(0)
            self._place(message, place)
        return last_seq + len(messages)

    async def dead_letter(self, entry: Entry, reason: str) -> None:
        """Store an entry's raw bytes in the dead-letter stream."""
        await asyncio.sleep(0)
        self._bury(entry, reason)

    def subscribe(self, consumer: Consumer) -> Subscription:
        """A worker's end of a shared durable consumer."""
        return _MemorySubscription(self._queue(consumer))

    async def read(self, stream: Stream, start: int = 1) -> AsyncIterator[Entry]:
        """All entries from `start` on, and then the new ones."""
        log = self._log(stream)
        seq = max(start, 1)
        while True:
            await asyncio.sleep(0)
            while seq <= log.last_seq:
                seq += 1
                if (entry := log.entries.get(seq - 1)) is not None:
                    yield entry
            await log.changed.wait()

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        """The entries at these sequences, in this order."""
        await asyncio.sleep(0)
        log = self._log(stream)
        for seq in seqs:
            if seq not in log.entries:
                raise LookupError(f"{stream.name} of run {self.run} holds nothing at sequence {seq}")
        return [log.entries[seq] for seq in seqs]

    async def last(self, stream: Stream, key: str = "") -> Entry | None:
        """The newest entry, of that key for keyed streams; None if there is none."""
        await asyncio.sleep(0)
        if stream is LEASES:
            self._expire_leases()
        return self._log(stream).newest(key)

    async def first(self, stream: Stream, key: str) -> Entry | None:
        """The oldest entry of a key."""
        await asyncio.sleep(0)
        return self._log(stream).oldest(key)

    async def info(self, stream: Stream) -> StreamInfo:
        """What the stream holds."""
        log = self._log(stream)
        return StreamInfo(next(iter(log.entries), log.last_seq + 1), log.last_seq, len(log.entries), log.nbytes)

    async def backlog(self, consumer: Consumer) -> ConsumerInfo:
        """What waits for the consumer's workers."""
        return self._backlog(consumer)

    async def acquire(self, name: str, holder: str, ttl_s: float) -> int | None:
        """Take the lease if it is free; returns its revision."""
        await asyncio.sleep(0)
        return self._lease(name, holder, 0, ttl_s)

    async def renew(self, name: str, holder: str, revision: int, ttl_s: float) -> int | None:
        """Hold on to a lease; returns the new revision, None if it was lost."""
        await asyncio.sleep(0)
        return self._lease(name, holder, revision, ttl_s)

    async def release(self, name: str, revision: int) -> None:
        """Give a lease up, unless it is another's by now."""
        await asyncio.sleep(0)
        self._log(LEASES).remove(revision)

    async def beat(self, gauges: Mapping[str, Any]) -> None:
        """Tell who listens how this actor is."""
        self._spread(beats_subject(self.run), gauges)

    def beats(self) -> AsyncIterator[dict[str, Any]]:
        """The gauges of all actors of the run as they come."""
        return self._heard(beats_subject(self.run))

    async def tell(self, listener: str, what: Mapping[str, Any]) -> None:
        """Tell one listener something."""
        self._spread(progress_subject(self.run, listener), what)

    def told(self, listener: str) -> AsyncIterator[dict[str, Any]]:
        """What this listener is told, as it comes."""
        return self._heard(progress_subject(self.run, listener))

    def _spread(self, where: str, what: Mapping[str, Any]) -> None:
        for queue in self._hub.listeners[where]:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(dict(what))

    async def _heard(self, where: str) -> AsyncIterator[dict[str, Any]]:
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(BEATS_MAX)
        self._hub.listeners[where].append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._hub.listeners[where].remove(queue)

    async def purge(self, stream: Stream, below_seq: int) -> None:
        """Delete entries below a sequence."""
        log = self._log(stream)
        for seq in [seq for seq in log.entries if seq < below_seq]:
            log.remove(seq)

    def _state(self) -> _Run:
        state = self._hub.runs.get(self.run)
        if state is None:
            raise BusUnavailable(f"run {self.run} has not been set up")
        return state

    def _log(self, stream: Stream) -> _Log:
        return self._state().logs[stream.name]

    def _queue(self, consumer: Consumer) -> _Queue:
        return self._state().queues[consumer.name]

    def _backlog(self, consumer: Consumer) -> ConsumerInfo:
        queue = self._queue(consumer)
        pending = sum(1 for _ in itertools.takewhile(lambda seq: seq >= queue.next_seq, reversed(queue.log.entries)))
        again = sum(given.deliveries > 1 for given in queue.given.values())
        return ConsumerInfo(pending, len(queue.given), again, queue.ack_wait_s)

    def _place(self, message: Message, place: int) -> None:
        """Store a message at a place of its stream, where it may stand already if this client wrote it."""
        log = self._log(STREAM_OF[type(message)])
        try:
            ack = self._store(message, expected=place - 1)
        except Fenced:
            there = log.entries.get(place)
            if there is None or (there.writer, there.data) != (self._writer, encode(message)):
                raise
        else:
            if ack.seq != place:
                raise Fenced(f"{log.stream.name}: {message.id!r} stands at {ack.seq} already, not at {place}")

    def _bury(self, entry: Entry, reason: str) -> None:
        self._log(DEAD).store(entry.stream.name, entry.data, dead_letter_headers(self.run, entry, reason))

    def _store(self, message: Message, expected: int | None = None) -> Ack:
        log = self._log(STREAM_OF[type(message)])
        headers = headers_of(self.run, message)
        if expected is not None:
            headers[WRITER_HEADER] = self._writer
        ack = log.store(key_of(message), encode(message), headers, expected)
        for queue in self._state().queues.values():
            if queue.log is log:
                queue.changed.notify()
        return ack

    def _lease(self, name: str, holder: str, revision: int, ttl_s: float) -> int | None:
        self._expire_leases()
        log = self._log(LEASES)
        now = log.newest(name)
        if (now.seq if now is not None else 0) != revision:
            return None
        headers = {ID_HEADER: f"{name}/{log.last_seq + 1}", RUN_HEADER: self.run}
        taken = log.store(name, holder.encode(), headers).seq
        self._state().lease_ends_s[taken] = asyncio.get_running_loop().time() + max(ttl_s, LEASE_MIN_S)
        return taken

    def _expire_leases(self) -> None:
        ends_s, now_s = self._state().lease_ends_s, asyncio.get_running_loop().time()
        for revision in [revision for revision, end_s in ends_s.items() if end_s <= now_s]:
            del ends_s[revision]
            self._log(LEASES).remove(revision)
