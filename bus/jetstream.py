"""The log on NATS JetStream: the real adapter of `bus.port.Bus`.

Facts about server 2.15 that this rests on, each found by experiment and held by a test in `tests/bus`:
- `Nats-Expected-Last-Sequence` is checked before the id is looked up. A retry whose first try was stored is therefore
  refused as a wrong sequence (10071), not answered as a duplicate; and an id that stands elsewhere in the stream is
  answered as a duplicate, with nothing stored, although the expected sequence was right. So a fenced writer looks what
  stands at its place. A refused message does not use up its id.
- A full stream answers 10077 "maximum bytes exceeded". A full disk answers nothing at all: see `Publisher._diagnose`.
- A lease's time to live is at least one second, and the subject's last sequence is 0 again once it has passed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgpack
import structlog

from bus import pull
from bus.connection import HEADER_BYTES_MAX, Connection, Incoming
from bus.port import (
    ID_HEADER,
    RUN_HEADER,
    WRITER_HEADER,
    Ack,
    BusUnavailable,
    ConsumerInfo,
    Entry,
    Fenced,
    StreamInfo,
    Subscription,
    dead_letter_headers,
    headers_of,
    key_of,
)
from bus.publish import Publisher, WrongSequence, stored_at
from bus.table import (
    CONSUMERS,
    DEAD,
    DEDUPE_WINDOW_S,
    LEASE_MIN_S,
    LEASES,
    PUBLISH_DEADLINE_S,
    STREAM_OF,
    STREAMS,
    Consumer,
    Stream,
    beats_subject,
    check_run_name,
    progress_subject,
    stream_name,
    subject,
)
from schemas import PAYLOAD_BYTES_MAX, Message, UserError, encode

RETRY_S = 0.05
API_TIMEOUT_S = 2.0
GET_TIMEOUT_S = 5.0  # a window of large entries may take its time
GET_WINDOW = 32
WAITING_PULLS_MAX = 2048
CREATE_DEADLINE_S = 5.0  # servers that have just started may not have found each other
CREATE_WAIT_MAX_S = 0.5
BEATS_MAX = 1000  # a listener that falls behind misses the oldest
BEAT_BYTES_MAX = 64 << 10

EXPECTED_SEQ_HEADER = "Nats-Expected-Last-Sequence"
EXPECTED_SUBJECT_SEQ_HEADER = "Nats-Expected-Last-Subject-Sequence"
TTL_HEADER = "Nats-TTL"

IN_USE_DIFFERENTLY = 10058  # the stream exists with another configuration
CONSUMER_EXISTS = 10148
STREAM_NOT_FOUND = 10059
CREATE_FAILED = 10049  # after deletes, once in a while; the next try succeeds
NOT_CLUSTERED = 10074  # replicas are asked of a single server
TOO_FEW_SERVERS = (10005, 10023)  # for the replicas, or with the space for them
NO_LEADER = (10008, 10009)  # now; one is being elected

_log = structlog.get_logger()


class JetStreamBus:
    """The log of one run on a NATS server with JetStream; see `bus.port.Bus` for what each method promises."""

    def __init__(self, run: str, url: str, name: str = "") -> None:
        self.run = check_run_name(run)
        self.url = url
        self._connection = Connection(url, name)
        self._publisher = Publisher(self._connection)
        self._writer = uuid.uuid4().hex[:12]

    @property
    def server(self) -> str:
        """Its URL without user and password. On one server no two runs have the same name."""
        return self._connection.shown_url

    async def connect(self) -> None:
        """Connect. Raises `UserError` with the remedy."""
        await self._connection.connect()

    async def close(self) -> None:
        """Flush and disconnect."""
        await self._connection.close()

    async def setup(self, ack_wait_s: float | None = None, replicas: int = 1) -> None:
        """Create the run's streams and consumers, or leave them as they are."""
        for stream in STREAMS:
            config = self._stream_config(stream, replicas)
            await self._create(f"STREAM.CREATE.{stream_name(self.run, stream)}", config)
            for consumer in CONSUMERS:
                if consumer.stream is stream:
                    config = _consumer_config(consumer, ack_wait_s or consumer.ack_wait_s)
                    body = {"stream_name": stream_name(self.run, stream), "action": "create", "config": config}
                    await self._create(f"CONSUMER.CREATE.{body['stream_name']}.{consumer.name}", body)

    async def exists(self) -> bool:
        """Whether the run has been set up: its last stream is there."""
        return await self._stream_state(STREAMS[-1]) is not None

    async def publish(self, message: Message) -> Ack:
        """Store a message under its id, with retries under the same id."""
        return await self._store(
            STREAM_OF[type(message)], key_of(message), encode(message), headers_of(self.run, message)
        )

    async def publish_fenced(self, messages: Sequence[Message], last_seq: int) -> int:
        """Store messages in order directly after `last_seq`, pipelined; returns the new last sequence."""
        end = last_seq + len(messages)
        if messages:  # the first alone: a writer that was overtaken must not get the later ones in at the log's end
            await self._place(messages[0], last_seq + 1)
        left = list(messages[1:])
        while left:
            left = left[await self._pipeline(left, end - len(left)) :]
            if left:  # the first of them got no good answer: with care, then on behind what stands already
                await self._place(left[0], end - len(left) + 1)
                left = left[1 + await self._standing(left[1:], end - len(left) + 1) :]
        return end

    async def _pipeline(self, messages: Sequence[Message], last_seq: int) -> int:
        """Send all at once; how many of them, from the first on, were stored at their places."""
        sent = [
            await self._publisher.post(*self._fenced(message, place))
            for place, message in enumerate(messages, last_seq + 1)
        ]
        stored = [stored_at(await future) == place for place, future in enumerate(sent, last_seq + 1)]
        return stored.index(False) if False in stored else len(stored)

    async def _standing(self, messages: Sequence[Message], last_seq: int) -> int:
        """How many of them, from the first on, stand at their places already."""
        if not messages:
            return 0
        stream = STREAM_OF[type(messages[0])]
        count = min(len(messages), (await self.info(stream)).last_seq - last_seq)
        entries = await self.get(stream, range(last_seq + 1, last_seq + 1 + count))
        same = [self._is_ours(entry, message) for entry, message in zip(entries, messages, strict=False)]
        return same.index(False) if False in same else len(same)

    def _fenced(self, message: Message, place: int) -> tuple[str, bytes, dict[str, str]]:
        target = subject(self.run, STREAM_OF[type(message)], key_of(message))
        return (
            target,
            encode(message),
            {
                **headers_of(self.run, message),
                WRITER_HEADER: self._writer,
                EXPECTED_SEQ_HEADER: str(place - 1),
            },
        )

    def _is_ours(self, entry: Entry, message: Message) -> bool:
        return entry.id == message.id and entry.writer == self._writer and entry.data == encode(message)

    async def _place(self, message: Message, place: int) -> None:
        stream = STREAM_OF[type(message)]
        try:
            ack = await self._publisher.store(stream_name(self.run, stream), *self._fenced(message, place))
        except WrongSequence as error:
            there = await self._leader_get(stream, {"seq": place})
            if there is not None and self._is_ours(there, message):
                return
            found = f"holds {there.id!r} of another writer" if there else "is not the next"
            raise Fenced(f"{stream.name}: place {place} of {message.id!r} {found} ({error})") from None
        if ack.seq != place:
            raise Fenced(f"{stream.name}: {message.id!r} stands at {ack.seq} already, not at {place}")

    async def dead_letter(self, entry: Entry, reason: str) -> None:
        """Store an entry's raw bytes in the dead-letter stream."""
        headers = dead_letter_headers(self.run, entry, reason)
        await self._store(DEAD, entry.stream.name, entry.data, headers)

    def subscribe(self, consumer: Consumer) -> Subscription:
        """A worker's end of a shared durable consumer."""
        return pull.JetStreamSubscription(self._connection, self.run, consumer.stream, consumer.name)

    def read(self, stream: Stream, start: int = 1) -> AsyncIterator[Entry]:
        """All entries from `start` on, and then the new ones."""
        return pull.read(self._connection, self.run, stream, start)

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        """The entries at these sequences, in this order."""
        target = f"$JS.API.DIRECT.GET.{stream_name(self.run, stream)}"
        entries: list[Entry] = []
        asked: deque[tuple[int, asyncio.Future[Incoming | None]]] = deque()
        for seq in [*seqs, *[0] * GET_WINDOW]:  # the zeros at the end only drain the window
            if len(asked) >= GET_WINDOW or (seq == 0 and asked):
                at, future = asked.popleft()
                entries.append(await self._got(stream, at, await future))
            if seq > 0:
                asked.append((seq, await self._connection.post(target, b'{"seq":%d}' % seq, GET_TIMEOUT_S)))
        return entries

    async def _got(self, stream: Stream, seq: int, reply: Incoming | None) -> Entry:
        if reply is not None and (entry := self._direct_entry(stream, reply)) is not None:
            return entry
        # No answer yet, or a replica that lags behind: the leader knows for certain.
        leader_entry = await self._leader_get(stream, {"seq": seq})
        if leader_entry is None:
            raise LookupError(f"{stream.name} of run {self.run} holds nothing at sequence {seq}")
        return leader_entry

    async def last(self, stream: Stream, key: str = "") -> Entry | None:
        """The newest entry, of that key for keyed streams; None if there is none."""
        wanted = subject(self.run, stream, key or ">") if stream.keyed else subject(self.run, stream)
        return await self._leader_get(stream, {"last_by_subj": wanted})  # a replica that lags would name an older one

    async def first(self, stream: Stream, key: str) -> Entry | None:
        """The oldest entry of a key."""
        return await self._leader_get(stream, {"seq": 1, "next_by_subj": subject(self.run, stream, key)})

    async def info(self, stream: Stream) -> StreamInfo:
        """What the stream holds."""
        state = await self._stream_state(stream)
        if state is None:
            raise BusUnavailable(f"run {self.run} has no stream {stream.name}: it has not been set up")
        last, count = int(state["last_seq"]), int(state["messages"])
        return StreamInfo(int(state["first_seq"]) if count else last + 1, last, count, int(state["bytes"]))

    async def backlog(self, consumer: Consumer) -> ConsumerInfo:
        """What waits for the consumer's workers."""
        answer = await self._api(f"CONSUMER.INFO.{stream_name(self.run, consumer.stream)}.{consumer.name}")
        _refuse(answer, f"consumer {consumer.name} of run {self.run}")
        return ConsumerInfo(
            pending=int(answer["num_pending"]),
            ack_pending=int(answer["num_ack_pending"]),
            redelivered=int(answer["num_redelivered"]),
            ack_wait_s=answer["config"]["ack_wait"] / 1e9,
        )

    async def acquire(self, name: str, holder: str, ttl_s: float) -> int | None:
        """Take the lease if it is free; returns its revision."""
        return await self._lease(name, holder, 0, ttl_s)

    async def renew(self, name: str, holder: str, revision: int, ttl_s: float) -> int | None:
        """Hold on to a lease; returns the new revision, None if it was lost."""
        return await self._lease(name, holder, revision, ttl_s)

    async def release(self, name: str, revision: int) -> None:
        """Give a lease up, unless it is another's by now."""
        await self._api(f"STREAM.MSG.DELETE.{stream_name(self.run, LEASES)}", {"seq": revision, "no_erase": True})

    async def _lease(self, name: str, holder: str, revision: int, ttl_s: float) -> int | None:
        headers = {
            ID_HEADER: f"{name}/{uuid.uuid4().hex}",
            RUN_HEADER: self.run,
            TTL_HEADER: f"{round(max(ttl_s, LEASE_MIN_S) * 1000)}ms",
            EXPECTED_SUBJECT_SEQ_HEADER: str(revision),
        }
        try:
            return (await self._store(LEASES, name, holder.encode(), headers)).seq
        except WrongSequence:
            # It is ours if only the acknowledgement of an earlier try was lost.
            now = await self._leader_get(LEASES, {"last_by_subj": subject(self.run, LEASES, name)})
            return now.seq if now is not None and now.id == headers[ID_HEADER] else None

    async def beat(self, gauges: Mapping[str, Any]) -> None:
        """Tell who listens how this actor is."""
        await self._send(beats_subject(self.run), gauges)

    async def tell(self, listener: str, what: Mapping[str, Any]) -> None:
        """Tell one listener something."""
        await self._send(progress_subject(self.run, listener), what)

    async def _send(self, where: str, what: Mapping[str, Any]) -> None:
        try:
            packed = msgpack.packb(dict(what))
        except (TypeError, ValueError, OverflowError) as error:
            _log.warning("beat_not_sent", error=str(error))
            return
        if len(packed) <= BEAT_BYTES_MAX and self._connection.is_up:
            await self._connection.send(where, packed, headers={RUN_HEADER: self.run})

    def beats(self) -> AsyncIterator[dict[str, Any]]:
        """The gauges of all actors of the run as they come."""
        return self._heard(beats_subject(self.run))

    def told(self, listener: str) -> AsyncIterator[dict[str, Any]]:
        """What this listener is told, as it comes."""
        return self._heard(progress_subject(self.run, listener))

    async def _heard(self, where: str) -> AsyncIterator[dict[str, Any]]:
        came: asyncio.Queue[bytes] = asyncio.Queue(BEATS_MAX)

        def take(message: Incoming) -> None:
            if came.full():
                came.get_nowait()
            came.put_nowait(message.data)

        listener = await self._connection.listen(where, take)
        try:
            while True:
                gauges = parse_beat(await came.get())
                if gauges is not None:
                    yield gauges
        finally:
            await listener.close()

    async def purge(self, stream: Stream, below_seq: int) -> None:
        """Delete entries below a sequence."""
        if below_seq > 1:
            answer = await self._api(f"STREAM.PURGE.{stream_name(self.run, stream)}", {"seq": below_seq})
            _refuse(answer, f"purge of {stream.name}")

    async def _store(self, stream: Stream, key: str, payload: bytes, headers: Mapping[str, str]) -> Ack:
        return await self._publisher.store(
            stream_name(self.run, stream), subject(self.run, stream, key), payload, headers
        )

    async def _api(self, what: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer of the JetStream API, errors included, retried over outages until `PUBLISH_DEADLINE_S`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + PUBLISH_DEADLINE_S
        payload = json.dumps(body).encode() if body is not None else b""
        problem = "no answer"
        while True:
            reply = await self._connection.request(f"$JS.API.{what}", payload, API_TIMEOUT_S)
            if reply is not None and reply.data:
                answer: dict[str, Any] = json.loads(reply.data)
                if answer.get("error", {}).get("err_code") not in NO_LEADER:
                    return answer
                problem = answer["error"].get("description", problem)
            if loop.time() > until_s:
                raise BusUnavailable(f"{problem} to {what} within {PUBLISH_DEADLINE_S:.0f} s; is JetStream enabled?")
            await self._connection.until_up(until_s - loop.time())
            await asyncio.sleep(RETRY_S)

    async def _create(self, what: str, body: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + CREATE_DEADLINE_S
        wait_s = RETRY_S
        while True:
            error = (await self._api(what, body)).get("error") or {}
            code, problem = error.get("err_code"), error.get("description", "refused")
            if not error or code in (IN_USE_DIFFERENTLY, CONSUMER_EXISTS):
                return
            if code not in (CREATE_FAILED, *TOO_FEW_SERVERS) or loop.time() > until_s:
                break
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, CREATE_WAIT_MAX_S)
        if code in (NOT_CLUSTERED, *TOO_FEW_SERVERS):
            raise UserError(
                f"The NATS server cannot keep {body.get('num_replicas', 1)} replicas of a stream: {problem}.",
                "Set bus.replicas to at most the number of servers in its cluster, or start those that are down.",
            )
        raise UserError(
            f"The NATS server cannot create {what.rpartition('.')[2]} for run {self.run}: {problem}.",
            "Streams reserve their bounds: set `max_file_store: 1PB` in its `jetstream`; check the disk.",
        )

    def _stream_config(self, stream: Stream, replicas: int) -> dict[str, Any]:
        return {
            "name": stream_name(self.run, stream),
            "subjects": [subject(self.run, stream, ">") if stream.keyed else subject(self.run, stream)],
            "retention": "limits",
            "discard": "new",
            "storage": "file",
            "max_bytes": stream.bytes_max,
            "max_msg_size": PAYLOAD_BYTES_MAX + HEADER_BYTES_MAX,
            "max_msgs_per_subject": 1 if stream.newest_only else -1,
            "max_msgs": -1,
            "max_consumers": -1,
            "max_age": 0,
            "num_replicas": replicas,  # consumers have as many, since they name none
            "duplicate_window": int(DEDUPE_WINDOW_S * 1e9),
            "allow_direct": True,
            "allow_msg_ttl": stream.expires,
        }

    async def _stream_state(self, stream: Stream) -> dict[str, Any] | None:
        answer = await self._api(f"STREAM.INFO.{stream_name(self.run, stream)}")
        if answer.get("error", {}).get("err_code") == STREAM_NOT_FOUND:
            return None
        _refuse(answer, f"stream {stream.name} of run {self.run}")
        state: dict[str, Any] = answer["state"]
        return state

    def _direct_entry(self, stream: Stream, reply: Incoming) -> Entry | None:
        headers = dict(reply.headers or {})
        if "Nats-Sequence" not in headers:
            return None
        seq, where = int(headers.pop("Nats-Sequence")), headers.pop("Nats-Subject")
        stamp = headers.pop("Nats-Time-Stamp")
        headers.pop("Nats-Stream")
        return Entry(stream, seq, pull.key_in(self.run, stream, where), headers, reply.data, _unix_s(stamp))

    async def _leader_get(self, stream: Stream, which: dict[str, Any]) -> Entry | None:
        """One entry by the leader's word: replicas may lag, and a fence must not."""
        answer = await self._api(f"STREAM.MSG.GET.{stream_name(self.run, stream)}", which)
        if answer.get("error", {}).get("code") == 404 and answer["error"].get("err_code") != STREAM_NOT_FOUND:
            return None
        _refuse(answer, f"stream {stream.name} of run {self.run}")
        found = answer["message"]
        return Entry(
            stream=stream,
            seq=int(found["seq"]),
            key=pull.key_in(self.run, stream, found["subject"]),
            headers=_headers(base64.b64decode(found.get("hdrs", ""))),
            data=base64.b64decode(found.get("data", "")),
            time_s=_unix_s(found["time"]),
        )


def parse_beat(packed: bytes) -> dict[str, Any] | None:
    """The gauges in a heartbeat, None if it is malformed: anybody on the server may write there."""
    gauges: object = None
    with contextlib.suppress(Exception):  # msgpack raises a dozen kinds
        gauges = msgpack.unpackb(packed[:BEAT_BYTES_MAX], max_array_len=4096, max_map_len=4096)
    if isinstance(gauges, dict) and all(isinstance(key, str) for key in gauges):
        return gauges
    return None


def _consumer_config(consumer: Consumer, ack_wait_s: float) -> dict[str, Any]:
    return {
        "name": consumer.name,
        "durable_name": consumer.name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(ack_wait_s * 1e9),
        "max_ack_pending": consumer.ack_pending_max,
        "max_deliver": -1,  # the shell counts; the server would leave the message behind without a record
        "max_waiting": WAITING_PULLS_MAX,
    }


def _refuse(answer: Mapping[str, Any], what: str) -> None:
    if "error" in answer:
        raise BusUnavailable(f"{what}: {answer['error'].get('description', 'refused')}")


def _headers(raw: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in raw.decode(errors="replace").split("\r\n")[1:] if line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _unix_s(stamp: str) -> float:
    """`2026-01-02T03:04:05.678901234Z` as Unix time, as exactly as `read` has it; Python reads microseconds."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return (seconds * 10**9 + int(fraction.ljust(9, "0")[:9])) / 1e9
