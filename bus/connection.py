"""The connection to the NATS server: the only file that imports nats.

What it adds to nats-py: one inbox for all replies, dispatched in the read loop itself (no task, queue or timer per
message), replies that are given up at once when the connection breaks, and errors a person can act on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from bus.greeting import REFUSED_REMEDY
from bus.port import BusUnavailable
from schemas import PAYLOAD_BYTES_MAX, UserError

Incoming: TypeAlias = Msg  # what listeners get: `subject`, `reply`, `data`, `headers` (None if it has none)

CONNECT_TIMEOUT_S = 4.0  # and `TRY_TIMEOUT_S` more for each further server
TRY_TIMEOUT_S = 2.0  # of one server
RECONNECT_WAIT_S = 0.1
PING_EVERY_S = 2.0  # three unanswered ones, and the connection counts as broken: a cut cable tells nothing
FLUSH_TIMEOUT_S = 2.0
SWEEP_S = 0.1  # how exactly a reply's timeout is kept
OUTGOING_BYTES_MAX = 64 << 20  # above the publish window, so that nats-py never blocks in the midst of a publish
HEADER_BYTES_MAX = 64 << 10
# What is sent within this time leaves in one system call. A call costs more than all else of a small message, and a
# worker that finishes a sample every two milliseconds would make three for each.
GATHER_S = 0.003

_log = structlog.get_logger()


class _Sink:
    """Takes a subscription's messages in the read loop, in place of nats-py's future for single replies.

    nats-py gives it every message by `set_result`. Its own ways cost a queue and a task switch a message, and drop
    messages above a limit; ours are bounded by the credit that we ask for.
    """

    def __init__(self, take: Callable[[Incoming], None]) -> None:
        self._take = take

    def cancelled(self) -> bool:
        return False

    def set_result(self, message: Incoming) -> None:
        try:
            self._take(message)
        except Exception:  # it would end nats-py's read loop, silently and for good
            _log.exception("listener_failed", subject=message.subject)


class Listener:
    """A subject being listened to, until `close`."""

    def __init__(self, client: Client, subscription: NatsSubscription, subject: str) -> None:
        self.subject = subject
        self._client = client
        self._subscription = subscription

    async def close(self) -> None:
        """Stop listening. Messages that the server had sent before it heard of that are still delivered meanwhile."""
        with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError, OSError):
            if self._client.is_connected:
                await asyncio.wait_for(self._subscription.drain(), FLUSH_TIMEOUT_S)  # type: ignore[no-untyped-call]
            else:
                await self._subscription.unsubscribe()


def servers_of(url: str) -> list[str]:
    """The servers that a URL names, separated by commas, each as a URL of its own."""
    parts = [part.strip() for part in url.split(",") if part.strip()]
    return [part if "://" in part else f"nats://{part}" for part in parts]


class Connection:
    """A connection that comes back by itself. `url` may name several servers of a cluster, separated by commas.

    They share the credentials, of which the first that are given count.
    """

    def __init__(self, url: str, name: str = "") -> None:
        servers = [urlsplit(server) for server in servers_of(url)]
        # Without the credentials, since servers of a cluster name each other to us without any: nats-py would take
        # those for further servers, and be refused there.
        self._servers = [server._replace(netloc=_without_user(server.netloc)).geturl() for server in servers]
        self._credentials = next(((s.username, s.password) for s in servers if s.username), (None, None))
        self._name = name
        self._client = Client()
        self._up = asyncio.Event()
        self._refused: asyncio.Future[str] | None = None
        self._last_error = ""
        self._inbox = ""
        self._tokens = itertools.count()
        self._waiting: dict[str, tuple[asyncio.Future[Incoming | None], float]] = {}
        self._sweeping = False
        self._gathered: list[tuple[str, bytes, str, Mapping[str, str] | None]] = []
        self._gathered_bytes = 0
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Future[None]] = set()
        self.on_change: set[Callable[[], None]] = set()  # called when the connection is new, or closed for good

    @property
    def shown_url(self) -> str:
        """The URL without its password, for people."""
        return ",".join(self._servers)

    async def connect(self) -> None:
        """Connect. Raises `UserError` if no server answers in time, or at once if one refuses us."""
        timeout_s = CONNECT_TIMEOUT_S + TRY_TIMEOUT_S * (len(self._servers) - 1)
        loop = asyncio.get_running_loop()
        self._refused = loop.create_future()
        trying = loop.create_task(self._connect())
        try:
            either: set[asyncio.Future[Any]] = {trying, self._refused}
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if trying.done():
                trying.result()
            else:
                await self._give_up(trying)
                self._raise_unreachable()
        except (nats.errors.Error, OSError, ValueError) as error:
            self._last_error = str(error) or type(error).__name__
            self._raise_unreachable()
        finally:
            if not trying.done():
                await self._give_up(trying)
            self._refused.cancel()
        if self._client.max_payload < PAYLOAD_BYTES_MAX + HEADER_BYTES_MAX:
            limit = self._client.max_payload
            await self.close()
            raise UserError(
                f"The NATS server at {self.shown_url} takes messages of at most {limit} bytes.",
                "Set `max_payload: 8MB` in its configuration.",
            )
        self._inbox = self._client.new_inbox()
        await self.listen(f"{self._inbox}.*", self._take_reply)
        self._up.set()

    async def _connect(self) -> None:
        user, password = self._credentials
        await self._client.connect(
            self._servers,
            user=user if password is not None else None,
            password=password,
            token=user if password is None else None,
            name=self._name or None,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,  # nats-py's default closes the connection for good after a while
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # it is only slept for
            connect_timeout=TRY_TIMEOUT_S,  # type: ignore[arg-type]  # it is only slept for
            ping_interval=PING_EVERY_S,  # type: ignore[arg-type]  # it is only slept for
            pending_size=OUTGOING_BYTES_MAX,
        )

    async def _give_up(self, trying: asyncio.Task[None]) -> None:
        trying.cancel()
        await asyncio.wait({trying}, timeout=FLUSH_TIMEOUT_S)
        await self._client.close()

    def _raise_unreachable(self) -> None:
        if self._refused is not None and self._refused.done() and not self._refused.cancelled():
            raise UserError(
                f"The NATS server at {self.shown_url} refused us: {self._refused.result()}.",
                REFUSED_REMEDY,
            )
        raise UserError(
            f"No NATS server answers at {self.shown_url}: {self._last_error or 'no answer'}.",
            "Is it running, and is the address right? `rollstream run` starts a private one if no URL is given.",
        )

    async def close(self) -> None:
        """Send what is left and disconnect."""
        await self._send_gathered()
        with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError, OSError):
            if self._client.is_connected:
                await self._client.flush(FLUSH_TIMEOUT_S)  # type: ignore[arg-type]
        self._up.clear()
        if not self._client.is_closed:
            # It drains a transport that the server may have ended in this very moment.
            with contextlib.suppress(nats.errors.Error, OSError, RuntimeError):
                await self._client.close()
        self._abandon_replies()

    @property
    def is_up(self) -> bool:
        """Whether we are connected now."""
        return self._up.is_set()

    async def until_up(self, timeout_s: float) -> bool:
        """Wait until connected; False if that took longer than `timeout_s`.

        Raises:
            BusUnavailable: the connection was closed, by us or for good by the server.
        """
        if self._up.is_set():
            return True
        self._check_open()
        try:
            await asyncio.wait_for(self._up.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def listen(self, subject: str, take: Callable[[Incoming], None]) -> Listener:
        """Call `take` with every message on a subject, in the read loop: it must be quick and must not raise."""
        sink: Any = _Sink(take)
        return Listener(self._client, await self._client.subscribe(subject, future=sink), subject)

    def new_inbox(self) -> str:
        """A subject that nobody else uses."""
        return self._client.new_inbox()

    async def send(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        """Send without an answer: buffered over short outages, may be lost in them; False if certainly not sent.

        Leaves after `GATHER_S`, together with all else that was sent by then, in the order of the calls.
        """
        if self._client.is_closed or self._gathered_bytes > OUTGOING_BYTES_MAX:
            return False
        if not self._gathered:
            asyncio.get_running_loop().call_later(GATHER_S, self._gathering_over)
        self._gathered.append((subject, payload, reply, headers))
        self._gathered_bytes += len(payload)
        return True

    def _gathering_over(self) -> None:
        task = asyncio.ensure_future(self._send_gathered())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_gathered(self) -> None:
        async with self._sending:  # in order, also when nats-py holds us up
            gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
            for subject, payload, reply, headers in gathered:
                with contextlib.suppress(nats.errors.OutboundBufferLimitError, nats.errors.ConnectionClosedError):
                    await self._client.publish(subject, payload, reply=reply, headers=headers)  # type: ignore[arg-type]

    async def post(
        self, subject: str, payload: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> asyncio.Future[Incoming | None]:
        """Send a request; the future is its reply, None if there was none in time or the connection broke.

        Requests posted one after the other reach the server in that order.

        Raises:
            BusUnavailable: the connection was closed, by us or for good by the server.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Incoming | None] = loop.create_future()
        if not self._up.is_set():
            future.set_result(None)
            return future
        token = f"{next(self._tokens):x}"
        self._waiting[token] = future, loop.time() + timeout_s
        if not self._sweeping:
            self._sweeping = True
            loop.call_later(SWEEP_S, self._sweep)
        if not await self.send(subject, payload, f"{self._inbox}.{token}", headers):
            self._settle(token, None)
        return future

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Incoming | None:
        """The reply to a request; see `post`."""
        return await (await self.post(subject, payload, timeout_s, headers))

    def _take_reply(self, message: Incoming) -> None:
        self._settle(message.subject.rpartition(".")[2], message)

    def _settle(self, token: str, reply: Incoming | None) -> None:
        future, _ = self._waiting.pop(token, (None, 0.0))
        if future is not None and not future.done():
            future.set_result(reply)

    def _sweep(self) -> None:
        """One timer for all replies; a timer each would cost more than the rest of a publish."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for token in [token for token, (_, until_s) in self._waiting.items() if until_s <= now_s]:
            self._settle(token, None)
        self._sweeping = bool(self._waiting)
        if self._sweeping:
            loop.call_later(SWEEP_S, self._sweep)

    def _abandon_replies(self) -> None:
        for token in list(self._waiting):
            self._settle(token, None)

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if self._refused is not None and not self._refused.done() and "authorization" in text.lower():
            self._refused.set_result(text)
        if text != self._last_error:  # each attempt to reconnect fails alike: say it once
            _log.warning("bus_failed", error=text, server=self.shown_url)
        self._last_error = text

    async def _on_disconnect(self) -> None:
        if self._up.is_set():
            _log.warning("bus_disconnected", server=self.shown_url)
        self._up.clear()
        self._abandon_replies()

    async def _on_reconnect(self) -> None:
        _log.info("bus_reconnected", server=self.shown_url)
        self._last_error = ""
        self._up.set()
        self._tell()

    async def _on_closed(self) -> None:
        self._up.clear()
        self._abandon_replies()
        self._tell()

    def _tell(self) -> None:
        for call in list(self.on_change):
            call()

    def _check_open(self) -> None:
        if self._client.is_closed:
            raise BusUnavailable(f"the connection to {self.shown_url} is closed: {self._last_error or 'by us'}")


def _without_user(netloc: str) -> str:
    return netloc.rpartition("@")[2]
