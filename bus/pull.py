"""Reading from JetStream by credit: the worker's end of a shared consumer, and the reader of a whole stream.

One long-lived pull request asks for many messages and is topped up, in place of a round trip a message. A pull ends
with its inbox: when nobody listens there, the server drops the request, and queues a message that it was just sending
for redelivery at once. So closing the inbox leaves no orphan that would swallow a message until `ack_wait_s`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Self

import structlog

from bus.connection import Connection, Incoming, Listener
from bus.port import BusUnavailable, Delivery, Entry
from bus.table import PUBLISH_DEADLINE_S, PUBLISH_TIMEOUT_S, Stream, stream_name, subject

EXPIRES_S = 30.0  # of one pull request
HEARTBEAT_S = 1.5
SILENCE_S = 4.0  # nothing heard for so long while messages are asked for: the request is lost
ASK_AGAIN_S = 0.1
READ_WINDOW_MESSAGES = 256
READ_WINDOW_BYTES = 32 << 20  # of one request; above the largest message, or nothing would ever come
READER_GONE_S = 15.0  # the server forgets a reader that has not asked for so long; it makes itself a new one

_log = structlog.get_logger()


def key_in(run: str, stream: Stream, subject_: str) -> str:
    """The key at the end of a keyed stream's subject; empty for the other streams."""
    return subject_[len(subject(run, stream)) :] if stream.keyed else ""


class _Pull:
    """Pull requests on one consumer, and how much of what they ask for is still to come (`credit`).

    `on_message` is called in the read loop. `lost` turns true when the requests are gone: connection broken, consumer
    deleted, leader changed, silence. Then `open` anew.
    """

    def __init__(self, connection: Connection, on_message: Callable[[Incoming], None], on_lost: Callable[[], None]):
        self.credit = 0
        self.lost = True
        self._connection = connection
        self._on_message = on_message
        self._on_lost = on_lost
        self._listener: Listener | None = None
        self._next = ""
        self._heard_s = 0.0
        self._not_before_s = 0.0

    async def open(self, stream: str, consumer: str) -> None:
        """Start on a fresh inbox: what old requests still bring does not count as credit."""
        await self.close()
        await asyncio.sleep(max(0.0, self._not_before_s - asyncio.get_running_loop().time()))
        # Registered before the inbox, so that a new connection in between is seen.
        self.lost = False
        self._connection.on_change.add(self.lose)
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        inbox = self._connection.new_inbox()

        def take(message: Incoming) -> None:
            self._take(message, inbox)

        self._listener = await self._connection.listen(inbox, take)

    async def close(self) -> None:
        """Withdraw the requests. What was on its way is given to `on_message` before this returns."""
        self._connection.on_change.discard(self.lose)
        listener, self._listener = self._listener, None
        self.lost = True
        if listener is not None:
            await listener.close()
        self.credit = 0

    async def ask(self, count: int, bytes_max: int = 0) -> None:
        """Ask for `count` more messages."""
        if self._listener is None:
            return
        request: dict[str, int] = {
            "batch": count,
            "expires": int(EXPIRES_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        if bytes_max:
            request["max_bytes"] = bytes_max
        if self.credit == 0:
            self._heard_s = asyncio.get_running_loop().time()
        self.credit += count
        if not await self._connection.send(self._next, json.dumps(request).encode(), self._listener.subject):
            self.lose()

    def check_silence(self) -> None:
        """Count the requests as lost if not even a heartbeat came for `SILENCE_S`."""
        if not self.lost and self.credit and asyncio.get_running_loop().time() - self._heard_s > SILENCE_S:
            _log.warning("pull_went_silent", subject=self._next)
            self.lose()

    def lose(self) -> None:
        """Give the requests up; whoever waits is woken to open anew."""
        self.lost = True
        self._on_lost()

    def _take(self, message: Incoming, inbox: str) -> None:
        current = self._listener is not None and self._listener.subject == inbox
        if current:
            self._heard_s = asyncio.get_running_loop().time()
        if message.reply:  # only messages of the stream have one, to be acknowledged at
            if current and self.credit:
                self.credit -= 1
            self._on_message(message)
            return
        headers = message.headers or {}
        status = headers.get("Status")
        if not current or status == "100":
            return
        if (left := headers.get("Nats-Pending-Messages")) is not None:  # this request ended, the consumer is well
            self.credit = max(0, self.credit - int(left))
            self._on_lost()  # wakes whoever waits, to ask again
            return
        _log.debug("pull_ended", subject=self._next, status=status, why=headers.get("Description"))
        self._not_before_s = self._heard_s + ASK_AGAIN_S  # a consumer that is gone shall not be asked in a hot loop
        self.lose()


class JetStreamDelivery:
    """An entry that the server gave to us; see `bus.port.Delivery`."""

    __slots__ = ("_connection", "_reply", "deliveries", "entry")

    def __init__(self, connection: Connection, entry: Entry, deliveries: int, reply: str) -> None:
        self.entry = entry
        self.deliveries = deliveries
        self._connection = connection
        self._reply = reply

    async def ack(self) -> None:
        """It is done and its results are stored. May be forgotten by the server, as any of these may."""
        await self._connection.send(self._reply, b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it to somebody, after `delay_s`."""
        await self._connection.send(self._reply, b'-NAK {"delay": %d}' % int(delay_s * 1e9) if delay_s > 0 else b"-NAK")

    async def term(self) -> None:
        """Never again."""
        await self._connection.send(self._reply, b"+TERM")

    async def in_progress(self) -> None:
        """Still working."""
        await self._connection.send(self._reply, b"+WPI")


class JetStreamSubscription:
    """A worker's end of a shared consumer; see `bus.port.Subscription`."""

    def __init__(self, connection: Connection, run: str, stream: Stream, consumer: str) -> None:
        self._connection = connection
        self._run = run
        self._stream = stream
        self._consumer = consumer
        self._buffer: deque[JetStreamDelivery] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._pull = _Pull(connection, self._take, self._notify)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pull.close()
        await self._give_back(0)

    async def fetch(self, most: int, timeout_s: float) -> list[Delivery]:
        """Up to `most` deliveries; see `bus.port.Subscription.fetch`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while True:
            await self._balance(most)
            left_s = until_s - loop.time()
            if self._buffer or left_s <= 0:
                break
            self._wake = loop.create_future()
            timer = loop.call_later(min(left_s, HEARTBEAT_S), self._notify)
            try:
                await self._wake
            finally:
                self._wake = None
                timer.cancel()
            self._pull.check_silence()
        return [self._buffer.popleft() for _ in range(min(most, len(self._buffer)))]

    async def _balance(self, most: int) -> None:
        """See to it that what is asked for and what is buffered are together at most `most`, and enough."""
        pull = self._pull
        if pull.credit + len(self._buffer) > most:
            await pull.close()
            await self._give_back(most)
        if pull.lost:
            if not await self._connection.until_up(ASK_AGAIN_S):
                return
            await pull.open(stream_name(self._run, self._stream), self._consumer)
        # Topped up by halves: a request for each message that was taken would double the traffic.
        if pull.credit <= most // 2 and (missing := most - pull.credit - len(self._buffer)) > 0:
            await pull.ask(missing)

    async def _give_back(self, keep: int) -> None:
        while len(self._buffer) > keep:
            await self._buffer.pop().nak()

    def _take(self, message: Incoming) -> None:
        entry, deliveries, _, _ = entry_of(self._run, self._stream, message)
        self._buffer.append(JetStreamDelivery(self._connection, entry, deliveries, message.reply))
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class _Reader:
    """Reads a stream through an ephemeral consumer without acknowledgements, made anew whenever it is lost."""

    def __init__(self, connection: Connection, run: str, stream: Stream, start: int) -> None:
        self._connection = connection
        self._run = run
        self._stream = stream
        self._last_seq = max(start, 1) - 1
        self._consumer = ""
        self._consumer_seq = 0
        self._entries: list[Entry] = []
        self._wake: asyncio.Future[None] | None = None
        self._pull = _Pull(connection, self._take, self._notify)

    async def batch(self) -> list[Entry]:
        """The next entries, at least one; waits for it."""
        loop = asyncio.get_running_loop()
        while True:
            await self._keep_asking()
            if self._entries:
                entries, self._entries = self._entries, []
                return entries
            self._wake = loop.create_future()
            timer = loop.call_later(HEARTBEAT_S, self._notify)
            try:
                await self._wake
            finally:
                self._wake = None
                timer.cancel()
            self._pull.check_silence()

    async def close(self) -> None:
        """Stop and let the server forget the consumer."""
        consumer, self._consumer = self._consumer, ""
        await self._pull.close()
        if consumer:
            await self._connection.send(f"$JS.API.CONSUMER.DELETE.{stream_name(self._run, self._stream)}.{consumer}")

    async def _keep_asking(self) -> None:
        while self._pull.lost:
            await self.close()
            self._consumer = await self._create()
            self._consumer_seq = 0
            await self._pull.open(stream_name(self._run, self._stream), self._consumer)
        if self._pull.credit <= READ_WINDOW_MESSAGES // 2:
            await self._pull.ask(READ_WINDOW_MESSAGES - self._pull.credit, READ_WINDOW_BYTES)

    async def _create(self) -> str:
        """A new consumer from the next entry on. Raises `BusUnavailable` after `PUBLISH_DEADLINE_S`."""
        stream = stream_name(self._run, self._stream)
        config = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._last_seq + 1,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(READER_GONE_S * 1e9),
        }
        until_s = asyncio.get_running_loop().time() + PUBLISH_DEADLINE_S
        problem = "no answer"
        while (left_s := until_s - asyncio.get_running_loop().time()) > 0:
            if not await self._connection.until_up(left_s):
                break
            # By a new name each time: a cluster may place it on a server that has just died, and it stays there.
            name = f"reader-{secrets.token_hex(8)}"
            body = json.dumps({"stream_name": stream, "config": config | {"name": name}}).encode()
            reply = await self._connection.request(f"$JS.API.CONSUMER.CREATE.{stream}.{name}", body, PUBLISH_TIMEOUT_S)
            if reply is not None and reply.data:
                error = json.loads(reply.data).get("error")
                if error is None:
                    return name
                problem = error.get("description", "")
            await asyncio.sleep(ASK_AGAIN_S)
        raise BusUnavailable(f"the {self._stream.name} of run {self._run} cannot be read: {problem}")

    def _take(self, message: Incoming) -> None:
        entry, _, consumer_seq, consumer = entry_of(self._run, self._stream, message)
        if consumer != self._consumer:
            return
        self._consumer_seq += 1
        if consumer_seq != self._consumer_seq:  # one was lost on the way; purged ones do not count here
            self._pull.lose()
            return
        self._last_seq = entry.seq
        self._entries.append(entry)
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


async def read(connection: Connection, run: str, stream: Stream, start: int) -> AsyncGenerator[Entry, None]:
    """All entries from `start` on, and then the new ones; see `bus.port.Bus.read`."""
    reader = _Reader(connection, run, stream, start)
    try:
        while True:
            for entry in await reader.batch():
                yield entry
    finally:
        await reader.close()


def entry_of(run: str, stream: Stream, message: Incoming) -> tuple[Entry, int, int, str]:
    """The entry in a delivered message, how often it was delivered, its sequence in the consumer, and the consumer.

    All stand in the reply subject: `$JS.ACK.<stream>.<consumer>.<deliveries>.<seq>.<consumer seq>.<time>.<pending>`,
    on servers with a domain with `<domain>.<account>.` before the stream.
    """
    tokens = message.reply.split(".")
    at = 4 if len(tokens) >= 11 else 2
    entry = Entry(
        stream=stream,
        seq=int(tokens[at + 3]),
        key=key_in(run, stream, message.subject),
        headers=message.headers or {},
        data=message.data,
        time_s=int(tokens[at + 5]) / 1e9,
    )
    return entry, int(tokens[at + 2]), int(tokens[at + 4]), tokens[at + 1]
