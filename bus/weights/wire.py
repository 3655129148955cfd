"""A plain blocking connection to a NATS server, for bytes by the gigabyte.

The client library copies and dispatches message by message in the event loop; this sends from the caller's memory, and
receives into it. One thread uses a connection.
"""

from __future__ import annotations

import json
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from bus.connection import servers_of
from bus.greeting import complaint, hello
from bus.port import BusUnavailable

CONNECT_TIMEOUT_S: Final = 4.0
SILENCE_S: Final = 10.0  # of a server that was asked for something
SOCKET_BUFFER_BYTES: Final = 4 << 20
LINES_BYTES: Final = 1 << 16  # received at once while looking for the next line
NO_MEMORY: Final = memoryview(bytearray(0))

Place = Callable[[str, bytes, int], memoryview]  # (subject, headers, bytes) -> where to put the payload


class Broken(Exception):
    """The connection cannot be used any more; another one may do."""


class Wire:
    """A connection with one inbox, to the first server that answers. Raises `BusUnavailable`, or `UserError`."""

    def __init__(self, url: str) -> None:
        self.inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._bytes = bytearray(LINES_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0
        servers = [urlsplit(server) for server in servers_of(url)]
        credentials = next((server for server in servers if server.username), servers[0])
        problem: Exception | None = None
        for server in servers:
            try:
                self._socket = self._connected(server, credentials)
                return
            except (OSError, Broken, ValueError) as error:
                problem = error
        raise BusUnavailable(f"no NATS server answers at {','.join(_shown(server) for server in servers)}: {problem}")

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def publish(self, subject: str, payload: memoryview | bytes, reply: bool = True) -> None:
        """Send a message; its answer comes to `receive`. Raises `Broken`."""
        answer = f" {self.inbox}" if reply else ""
        self._send([f"PUB {subject}{answer} {len(payload)}\r\n".encode(), payload, b"\r\n"])

    def receive(self, place: Place) -> tuple[bytes, memoryview]:
        """Headers and payload of the next message, put where `place` says. Raises `Broken`, `UserError`."""
        while True:
            parts = self._line().split(b" ")  # HMSG subject sid [reply] header-bytes bytes; MSG has no headers
            if parts[0] in (b"MSG", b"HMSG"):
                size = int(parts[-1])
                header_size = int(parts[-2]) if parts[0] == b"HMSG" else 0
                headers = bytearray(header_size)
                self._fill(memoryview(headers))
                payload = place(parts[1].decode(), bytes(headers), size - header_size)
                self._fill(payload)
                self._fill(memoryview(bytearray(2)))
                return bytes(headers), payload
            if parts[0] == b"PING":
                self._send([b"PONG\r\n"])
            elif parts[0] == b"-ERR":
                raise Broken(complaint(b" ".join(parts)))

    def request(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer of the JetStream API. Raises `Broken`, also for one that is not up."""
        self.publish(subject, b"" if body is None else json.dumps(body).encode())
        _, payload = self.receive(lambda subject, headers, size: memoryview(bytearray(size)))
        if not payload:
            raise Broken("its JetStream does not answer")
        answer: dict[str, Any] = json.loads(bytes(payload))
        return answer

    # ---- connecting

    def _connected(self, server: SplitResult, credentials: SplitResult) -> socket.socket:
        host = server.hostname or "127.0.0.1"
        self._socket = plain = socket.create_connection((host, server.port or 4222), CONNECT_TIMEOUT_S)
        try:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                plain.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = self._line()
            if not line.startswith(b"INFO "):
                raise Broken("it is no NATS server")
            if json.loads(line[5:]).get("tls_required") or server.scheme == "tls":
                self._socket = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            self._send([hello(credentials, "weights"), b"SUB %s 1\r\nPING\r\n" % self.inbox.encode()])
            while (line := self._line()) != b"PONG":
                if line.startswith(b"-ERR"):
                    raise Broken(complaint(line))
            self._socket.settimeout(SILENCE_S)
        except BaseException:
            self._socket.close()
            raise
        return self._socket

    # ---- bytes

    def _send(self, parts: Sequence[memoryview | bytes]) -> None:
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                for part in parts:
                    self._socket.sendall(part)
                return
            left = [memoryview(part) for part in parts if len(part)]
            while left:
                sent = self._socket.sendmsg(left)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if left:
                    left[0] = left[0][sent:]
        except OSError as error:
            raise Broken(str(error) or type(error).__name__) from None

    def _receive(self, into: memoryview) -> int:
        try:
            count = self._socket.recv_into(into)
        except OSError as error:
            raise Broken(str(error) or type(error).__name__) from None
        if not count:
            raise Broken("the server closed the connection")
        return count

    def _line(self) -> bytes:
        """The next line, without its end."""
        while (at := self._bytes.find(b"\r\n", self._start, self._end)) < 0:
            if self._start == self._end:
                self._start = self._end = 0
            elif self._end == len(self._buffer):
                left = bytes(self._buffer[self._start : self._end])
                if len(left) == len(self._buffer):
                    raise Broken("it sends what makes no sense")
                self._buffer[: len(left)] = left
                self._start, self._end = 0, len(left)
            self._end += self._receive(self._buffer[self._end :])
        line = bytes(self._buffer[self._start : at])
        self._start = at + 2
        return line

    def _fill(self, into: memoryview) -> None:
        """Receive as many bytes as `into` has."""
        done = min(len(into), self._end - self._start)
        into[:done] = self._buffer[self._start : self._start + done]
        self._start += done
        while done < len(into):
            done += self._receive(into[done:])


def _shown(server: SplitResult) -> str:
    return server._replace(netloc=server.netloc.rpartition("@")[2]).geturl()
