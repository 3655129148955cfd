"""Reading much of a log at once: a plain socket, batches of a pull consumer, and a parser of the few lines that matter.

The client library parses and dispatches message by message in the event loop, at 25 µs of CPU each; this takes 7. Of
the ways to ask, a consumer costs the server a third of what batched direct gets do. Every batch is asked for when the
last one has come, so a connection that breaks costs nothing but the batch: the next consumer starts behind it.

A batch is asked for before the last one is handed out: the server reads it meanwhile, and the kernel keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from bus.greeting import complaint, hello
from bus.port import BusUnavailable, Entry
from bus.table import Stream, stream_name, subject

BATCH_MESSAGES: Final = 1024
BATCH_BYTES: Final = 32 << 20  # of one request; above the largest message, or nothing would ever come
RECEIVE_BYTES: Final = 1 << 20
MESSAGE_BYTES_MAX: Final = 64 << 20  # the server's own bound on `max_payload`
CONNECT_TIMEOUT_S: Final = 4.0
SILENCE_S: Final = 5.0  # of a server that was asked; then it is asked again on a new connection
DEADLINE_S: Final = 30.0  # without any progress
READER_GONE_S: Final = 15.0  # the server forgets a consumer that has not asked for so long; another is made
RETRY_S: Final = 0.1


def usable(url: str) -> bool:
    """Whether one server answers there without TLS; else read by the port. Blocks, at most `CONNECT_TIMEOUT_S`."""
    if urlsplit(url).scheme != "nats" or "," in url:
        return False
    try:
        with socket.create_connection(_address(url), CONNECT_TIMEOUT_S) as plain:
            info = _info(_Lines(plain).line())
    except (OSError, EOFError, ValueError):
        return False
    return not info.get("tls_required")


async def read(url: str, run: str, stream: Stream, start: int, stop: int) -> AsyncGenerator[Entry, None]:
    """The entries with `start <= seq < stop`, in order, from a server that is `usable`; then it ends.

    A batch at a time is read beside the event loop; at most two are in memory. Survives restarts of the server.

    Raises:
        BusUnavailable: no answer for `DEADLINE_S`.
        UserError: the server refuses us.
    """
    reader = _Reader(url, run, stream)
    batches = reader.batches(start, stop)
    try:
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            for entry in batch:
                yield entry
    finally:
        reader.stop()


class _Lines:
    """Bytes of a socket, by line and by count."""

    def __init__(self, plain: socket.socket) -> None:
        self._socket = plain
        self._buffer = b""
        self._at = 0

    def line(self) -> bytes:
        """The next line, without its end. Raises `EOFError`, `OSError`."""
        while (end := self._buffer.find(b"\r\n", self._at)) < 0:
            self._receive(1)
        line = self._buffer[self._at : end]
        self._at = end + 2
        return line

    def take(self, count: int) -> bytes:
        """The next `count` bytes and the line end behind them, without that."""
        missing = self._at + count + 2 - len(self._buffer)
        if missing > 0:
            self._receive(missing)
        taken = self._buffer[self._at : self._at + count]
        self._at += count + 2
        return taken

    def _receive(self, count: int) -> None:
        """Receive at least `count` more bytes."""
        parts, have = [self._buffer[self._at :]], 0
        while have < count:
            part = self._socket.recv(RECEIVE_BYTES)
            if not part:
                raise EOFError("the server closed the connection")
            parts.append(part)
            have += len(part)
        self._buffer, self._at = b"".join(parts), 0


class _Reader:
    """One read of one stream, over as many connections as it takes."""

    def __init__(self, url: str, run: str, stream: Stream) -> None:
        self._url = url
        self._run = run
        self._stream = stream
        self._name = stream_name(run, stream)
        self._key_from = len(subject(run, stream))
        self._socket: socket.socket | None = None
        self._lines: _Lines | None = None
        self._inbox = ""
        self._consumer = ""
        self._stopped = False
        self._asked = 0  # messages of the request that is under way; 0 if none is
        self._requests = 0
        self._pending = 0  # messages in the stream behind the last one that came

    def stop(self) -> None:
        """Read no more: from another thread too, which is woken if it waits for the server."""
        self._stopped = True
        self._leave()

    def batches(self, start: int, stop: int) -> Iterator[list[Entry]]:
        """The entries from `start` to `stop`, a batch at a time."""
        try:
            yield from self._batches(start, stop)
        finally:
            self._disconnect()

    def _batches(self, start: int, stop: int) -> Iterator[list[Entry]]:
        until_s = time.monotonic() + DEADLINE_S
        while start < stop:
            try:
                if not self._asked:
                    self._ask(start, stop)
                batch = self._batch()
                start = batch[-1].seq + 1 if batch else start
                if start < stop and self._pending:
                    self._ask(start, stop)
            except (OSError, EOFError, ValueError, IndexError) as error:
                self._disconnect()
                if self._stopped:
                    return
                if time.monotonic() > until_s:
                    problem = str(error) or type(error).__name__
                    raise BusUnavailable(f"{self._name} cannot be read from {start} on: {problem}") from None
                time.sleep(RETRY_S)
                continue
            if batch:
                until_s = time.monotonic() + DEADLINE_S
                yield [entry for entry in batch if entry.seq < stop] if start > stop else batch
            if not self._pending:
                return

    def _leave(self) -> None:
        """Let the server forget the consumer, which else it does after `READER_GONE_S`, and hang up."""
        plain = self._socket
        if plain is not None:
            with contextlib.suppress(OSError):
                plain.sendall(b"PUB $JS.API.CONSUMER.DELETE.%s.%s 0\r\n\r\n" % self._names())
                plain.shutdown(socket.SHUT_RDWR)

    def _disconnect(self) -> None:
        self._leave()
        plain, self._socket, self._lines, self._asked = self._socket, None, None, 0
        if plain is not None:
            plain.close()

    def _ask(self, start: int, stop: int) -> None:
        plain = self._socket or self._connect(start)
        self._asked = min(BATCH_MESSAGES, stop - start)
        self._requests += 1
        body = json.dumps({"batch": self._asked, "max_bytes": BATCH_BYTES, "no_wait": True}).encode()
        target = b"$JS.API.CONSUMER.MSG.NEXT.%s.%s" % self._names()
        plain.sendall(b"PUB %s %s.%d %d\r\n%s\r\n" % (target, self._inbox.encode(), self._requests, len(body), body))

    def _names(self) -> tuple[bytes, bytes]:
        return self._name.encode(), self._consumer.encode()

    def _connect(self, start: int) -> socket.socket:
        """A new connection, and on it a new consumer that begins at `start`."""
        self._socket = plain = socket.create_connection(_address(self._url), CONNECT_TIMEOUT_S)
        plain.settimeout(SILENCE_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = lines = _Lines(plain)
        _info(lines.line())
        self._consumer = f"bulk-{secrets.token_hex(8)}"
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        config = {
            "name": self._consumer,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": start,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(READER_GONE_S * 1e9),
        }
        body = json.dumps({"stream_name": self._name, "config": config}).encode()
        plain.sendall(
            hello(urlsplit(self._url), "bulk")
            + b"SUB %s.* 1\r\n" % self._inbox.encode()
            + b"PUB $JS.API.CONSUMER.CREATE.%s.%s " % self._names()
            + b"%s.0 %d\r\n%s\r\n" % (self._inbox.encode(), len(body), body)
        )
        while not (line := lines.line()).startswith(b"MSG "):
            if line.startswith(b"HMSG "):
                raise EOFError("its JetStream is not up")
            self._control(line)
        answer = json.loads(lines.take(int(line.rpartition(b" ")[2])))
        if not isinstance(answer, dict) or "error" in answer:
            raise EOFError(f"it makes no consumer: {str(answer)[:200]}")
        return plain

    def _control(self, line: bytes) -> None:
        """A line that is no message."""
        if line == b"PING" and self._socket is not None:
            self._socket.sendall(b"PONG\r\n")
        elif line.startswith(b"-ERR"):
            raise EOFError(complaint(line))

    def _batch(self) -> list[Entry]:
        """What comes of the request that is under way. Sets `_pending`."""
        entries: list[Entry] = []
        lines = self._lines
        assert lines is not None, "ask first"
        first = place = 0
        while len(entries) < self._asked:
            line = lines.line()
            parts = line.split(b" ")  # HMSG subject 1 reply header-bytes bytes; MSG has no header, a status no reply
            if parts[0] not in (b"HMSG", b"MSG"):
                self._control(line)
                continue
            size = int(parts[-1])
            header_size = int(parts[-2]) if parts[0] == b"HMSG" else 0
            if not 0 <= header_size <= size <= MESSAGE_BYTES_MAX:
                raise EOFError(f"it sends what makes no sense: {line[:80]!r}")
            message = lines.take(size)
            if not parts[1].startswith(b"rs."):
                if int(parts[1].rpartition(b".")[2]) == self._requests and self._ended(message):
                    break
                continue
            # $JS.ACK.<stream>.<consumer>.<deliveries>.<seq>.<consumer seq>.<time>.<pending>, see `bus.pull.entry_of`
            tokens = parts[3].split(b".")
            at = 7 if len(tokens) >= 11 else 5
            place = int(tokens[at + 1])
            first = first or place
            self._pending = int(tokens[at + 3])
            key = parts[1][self._key_from :].decode() if self._stream.keyed else ""
            headers = _headers(message[10 : header_size - 4]) if header_size else {}
            entries.append(
                Entry(self._stream, int(tokens[at]), key, headers, message[header_size:], int(tokens[at + 2]) / 1e9)
            )
            if not self._pending:
                break
        self._asked = 0
        if entries and place - first != len(entries) - 1:
            raise EOFError("messages were lost on the way")
        return entries

    def _ended(self, status: bytes) -> bool:
        """Whether a status, such as `NATS/1.0 404 No Messages`, ends the request. Raises if it is lost."""
        code = status[9:12]
        if code == b"404":
            self._pending = 0
            return True
        if code in (b"408", b"409") and b"Nats-Pending-Messages" in status:
            return True
        if code == b"100":
            return False
        raise EOFError(f"it answers {status[9:80].decode(errors='replace').strip()}")


def _headers(own: bytes) -> dict[str, str]:
    """The headers in the lines behind `NATS/1.0`."""
    lines = own.decode(errors="replace").split("\r\n")
    try:
        return dict([line.split(": ", 1) for line in lines])
    except ValueError:  # the blank is customary and not required
        pairs = (line.partition(":") for line in lines if line)
        return {name.strip(): value.strip() for name, _, value in pairs}


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 4222


def _info(line: bytes) -> dict[str, Any]:
    """What the server tells of itself first."""
    if not line.startswith(b"INFO "):
        raise EOFError("no NATS server answers")
    info = json.loads(line[5:])
    if not isinstance(info, dict):
        raise EOFError("no NATS server answers")
    return info
