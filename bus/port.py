"""The port to the log: what actors may ask of it. Adapters: `bus.jetstream` (real), `bus.memory` (tests, simulation).

It promises what JetStream keeps and no more: acknowledged messages are durable and ordered within a stream; consumers
deliver at least once, maybe out of order, maybe again after `ack_wait_s`, and acknowledgements can be forgotten; the
broker de-duplicates ids within a window only. Who needs more builds it on ids and sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, Self

from bus.table import Consumer, Stream
from schemas import Answer, Message, Note, Partial, Turn, decode, parse_sample_id
from schemas.ids import parse_pair

ID_HEADER = "Nats-Msg-Id"
RUN_HEADER = "Rs-Run"
WRITER_HEADER = "Rs-Writer"  # of fenced messages: which connection wrote it
VERSIONS_HEADER = "Rs-Versions"  # "<oldest>-<newest>" policy version, absent if the message has none
REASON_HEADER = "Rs-Reason"  # of dead letters, as are the next three: where the entry stood, and its id there
FROM_HEADER = "Rs-From"
SEQ_HEADER = "Rs-Seq"
WAS_HEADER = "Rs-Was"
REASON_CHARS_MAX = 500


class BusUnavailable(Exception):
    """The log could not be reached within the deadline. The actor ends and its supervisor starts it again."""


class BusFull(Exception):
    """A stream has reached `bytes_max`, or the disk is full: nothing was stored, nothing was lost."""


class Fenced(Exception):
    """Another writer has written to a stream that only one may write. This writer is no longer the active one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ack:
    """The log has stored a message at `seq`, or had it already (`duplicate`, then `seq` is that of the first)."""

    seq: int
    duplicate: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One stored message, not yet decoded. `seq` counts from 1 in its stream; `time_s` is the broker's Unix time."""

    stream: Stream
    seq: int
    key: str
    headers: Mapping[str, str]
    data: bytes
    time_s: float = 0.0

    @property
    def id(self) -> str:
        """The message's id."""
        return self.headers.get(ID_HEADER, "")

    @property
    def writer(self) -> str:
        """The connection that wrote it, of fenced messages."""
        return self.headers.get(WRITER_HEADER, "")

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version, from the header."""
        return parse_pair(self.headers.get(VERSIONS_HEADER, ""))

    @property
    def sample(self) -> tuple[int, int] | None:
        """`(group_id, index)` by the header, for messages that do not decode; None if the id names no sample."""
        return parse_sample_id(self.id.partition("/")[0])

    def message(self) -> Message:
        """The decoded message. Raises `schemas.MalformedMessage`."""
        return decode(self.data)


def key_of(message: Message) -> str:
    """The key under which the message stands in a keyed stream; empty for the other streams."""
    if isinstance(message, Partial):
        return message.of
    if isinstance(message, Turn):
        return message.place
    if isinstance(message, Note):
        return message.id
    return message.turn if isinstance(message, Answer) else ""


def headers_of(run: str, message: Message) -> dict[str, str]:
    """The headers that every message of a run carries."""
    headers = {ID_HEADER: message.id, RUN_HEADER: run}
    if message.versions is not None:
        headers[VERSIONS_HEADER] = "{}-{}".format(*message.versions)
    return headers


def dead_letter_headers(run: str, entry: Entry, reason: str) -> dict[str, str]:
    """The headers of an entry's dead letter. Its id names the place, so an entry has one dead letter."""
    return {
        ID_HEADER: f"{entry.stream.name}/{entry.seq}",
        RUN_HEADER: run,
        REASON_HEADER: " ".join(reason.split())[:REASON_CHARS_MAX],
        FROM_HEADER: entry.stream.name,
        SEQ_HEADER: str(entry.seq),
        WAS_HEADER: entry.id,
    }


class Delivery(Protocol):
    """An entry given to one worker of a shared consumer, which now owes one of `ack`, `nak`, `term`."""

    entry: Entry
    deliveries: int  # 1 the first time

    async def ack(self) -> None:
        """It is done and its results are stored."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it to somebody, after `delay_s`."""

    async def term(self) -> None:
        """Never again: it was dead-lettered."""

    async def in_progress(self) -> None:
        """Still working: the `ack_wait_s` starts anew."""


class Subscription(Protocol):
    """A worker's end of a shared consumer: an async context manager that on exit gives back what it still holds."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...

    async def fetch(self, most: int, timeout_s: float) -> list[Delivery]:
        """Up to `most` deliveries: waits at most `timeout_s` for the first, takes what is there; [] if none.

        At no time are more than `most` messages asked for and not yet returned, so a worker is never given more than it
        has room for. 0 takes back what was asked for. Survives restarts of the server.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class StreamInfo:
    """What a stream holds. `first_seq` is `last_seq + 1` if it is empty."""

    first_seq: int
    last_seq: int
    messages: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """A consumer's backlog: `pending` not yet given out, `ack_pending` given out and not settled.

    `ack_wait_s` is the wait in force, which `setup` may have set otherwise than the table says.
    """

    pending: int
    ack_pending: int
    redelivered: int
    ack_wait_s: float


class Bus(Protocol):
    """The log of one run."""

    run: str

    async def connect(self) -> None:
        """Connect. Raises `schemas.UserError` with the remedy if the server cannot be reached or refuses us."""

    async def close(self) -> None:
        """Flush and disconnect."""

    async def setup(self, ack_wait_s: float | None = None, replicas: int = 1) -> None:
        """Create the run's streams and consumers, or leave them as they are. `ack_wait_s` overrides the table's.

        Raises:
            UserError: the server cannot keep them, or not so many `replicas`.
        """

    async def exists(self) -> bool:
        """Whether the run has been set up on this server."""

    async def publish(self, message: Message) -> Ack:
        """Store a message under its id; retries under the same id until stored.

        Raises:
            BusFull: the stream or disk is full.
            BusUnavailable: not stored within `PUBLISH_DEADLINE_S`.
        """

    async def publish_fenced(self, messages: Sequence[Message], last_seq: int) -> int:
        """Store messages, all of one stream, in order directly after `last_seq`; returns the new last sequence.

        Pipelined. A message that already stands at its place counts as stored if this very connection wrote the same
        bytes, so a retry is safe. Ids are not enough: two controllers that decide alike write the same ids, and each
        would take the other's messages for its own; and one that leads again, having folded a log that a lagging
        replica showed, would take what it wrote before for what it has decided now.

        Raises:
            Fenced: something else stands there.
            BusFull, BusUnavailable: as in `publish`.
        """

    async def dead_letter(self, entry: Entry, reason: str) -> None:
        """Store an entry's raw bytes in the dead-letter stream, with the reason and where it came from as headers."""

    def subscribe(self, consumer: Consumer) -> Subscription:
        """A worker's end of a shared durable consumer."""

    def read(self, stream: Stream, start: int = 1) -> AsyncIterator[Entry]:
        """All entries from sequence `start` on, each once, in order, and then the new ones as they come; never ends.

        No acknowledgements: the reader's position is its own. Survives restarts of the server.
        """

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        """The entries at these sequences, in this order, fetched concurrently.

        Raises:
            LookupError: one of them is not there (purged, or never was).
        """

    async def last(self, stream: Stream, key: str = "") -> Entry | None:
        """The newest entry, of that key for keyed streams; None if there is none."""

    async def first(self, stream: Stream, key: str) -> Entry | None:
        """The oldest entry of a key in a keyed stream; None if there is none.

        Where one message of a key is to count for ever and may be stored again, it is this one.
        """

    async def info(self, stream: Stream) -> StreamInfo:
        """What the stream holds."""

    async def backlog(self, consumer: Consumer) -> ConsumerInfo:
        """What waits for the consumer's workers."""

    async def acquire(self, name: str, holder: str, ttl_s: float) -> int | None:
        """Take the lease `name` if it is free; returns its revision, None if somebody holds it."""

    async def renew(self, name: str, holder: str, revision: int, ttl_s: float) -> int | None:
        """Hold on to a lease; returns the new revision, None if it was lost."""

    async def release(self, name: str, revision: int) -> None:
        """Give a lease up, so that a standby need not wait for its end."""

    async def beat(self, gauges: Mapping[str, Any]) -> None:
        """Tell who listens how this actor is; plain data, lost if nobody does. Never raises, never waits."""

    def beats(self) -> AsyncIterator[dict[str, Any]]:
        """The gauges of all actors of the run as they come."""

    async def tell(self, listener: str, what: Mapping[str, Any]) -> None:
        """Tell one listener of the run something that is no part of the log; as `beat`."""

    def told(self, listener: str) -> AsyncIterator[dict[str, Any]]:
        """What this listener is told, as it comes."""

    async def purge(self, stream: Stream, below_seq: int) -> None:
        """Delete entries below a sequence."""
