"""Publishing to JetStream: a bounded window of messages, each retried under its id until the server acknowledges it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Mapping
from typing import Any

from bus.connection import Connection, Incoming
from bus.port import Ack, BusFull, BusUnavailable
from bus.table import PUBLISH_DEADLINE_S, PUBLISH_TIMEOUT_S, PUBLISH_WINDOW_BYTES, PUBLISH_WINDOW_MESSAGES

BACKOFF_S = 0.05
BACKOFF_MAX_S = 1.0

WRONG_LAST_SEQUENCE = 10071
ID_IN_PROCESS = 10158  # in a cluster: an earlier try of this message is still being agreed on
STORE_FAILED = 10077
NO_STORAGE = (10023, 10047)
FULL_WORDS = ("maximum bytes exceeded", "no space left", "insufficient", "resource limits exceeded", "disk quota")
UNANSWERED_MAX = 3  # attempts without an answer on a sound connection, before we ask the stream what ails it
NO_SUCH_SEQ = 1 << 62


class WrongSequence(Exception):
    """The server refused a message because its expected sequence was not the last one."""


class Window:
    """Bounds what is sent and not yet acknowledged, in messages and bytes. First come, first served."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages_left = messages_max
        self._bytes_left = self._bytes_max = bytes_max
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    async def enter(self, nbytes: int) -> None:
        """Wait for room. A message larger than the whole window enters when it is empty."""
        nbytes = min(nbytes, self._bytes_max)
        if self._queue or not self._take(nbytes):
            ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append((ticket, nbytes))
            try:
                await ticket
            except asyncio.CancelledError:
                if ticket.done() and not ticket.cancelled():
                    self.leave(nbytes)
                raise

    def leave(self, nbytes: int) -> None:
        """Give room back."""
        self._messages_left += 1
        self._bytes_left += min(nbytes, self._bytes_max)
        while self._queue and (self._queue[0][0].done() or self._take(self._queue[0][1])):
            ticket, _ = self._queue.popleft()
            if not ticket.done():
                ticket.set_result(None)

    def _take(self, nbytes: int) -> bool:
        if self._messages_left < 1 or self._bytes_left < nbytes:
            return False
        self._messages_left -= 1
        self._bytes_left -= nbytes
        return True


class Publisher:
    """Publishes with retries, never more than the window at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._window = Window(PUBLISH_WINDOW_MESSAGES, PUBLISH_WINDOW_BYTES)
        self._random = random.Random()

    async def store(self, stream: str, target: str, payload: bytes, headers: Mapping[str, str]) -> Ack:
        """Publish until acknowledged. Raises `WrongSequence`, `BusFull`, `BusUnavailable`."""
        await self._window.enter(len(payload))
        try:
            return await self._retried(stream, target, payload, headers)
        finally:
            self._window.leave(len(payload))

    async def post(self, target: str, payload: bytes, headers: Mapping[str, str]) -> asyncio.Future[Incoming | None]:
        """Publish once; the future is the acknowledgement, see `stored_at`. Messages keep the order of the calls."""
        size = len(payload)
        await self._window.enter(size)
        try:
            future = await self._connection.post(target, payload, PUBLISH_TIMEOUT_S, headers)
        except BaseException:
            self._window.leave(size)
            raise
        future.add_done_callback(lambda _: self._window.leave(size))
        return future

    async def _retried(self, stream: str, target: str, payload: bytes, headers: Mapping[str, str]) -> Ack:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + PUBLISH_DEADLINE_S
        backoff_s = BACKOFF_S
        problem = "no answer"
        unanswered = 0
        while True:
            reply = await self._connection.request(target, payload, PUBLISH_TIMEOUT_S, headers)
            if reply is None and self._connection.is_up:
                unanswered += 1
                if unanswered % UNANSWERED_MAX == 0:
                    await self._diagnose(stream, target)
            elif reply is not None and not reply.data:
                problem = "no stream listens there; has the run been set up?"
            elif reply is not None:
                answer = json.loads(reply.data)
                error = answer.get("error")
                if error is None:
                    return Ack(answer["seq"], answer.get("duplicate", False))
                problem = error["description"]
                self._judge(target, error)
            if loop.time() > until_s:
                raise BusUnavailable(f"not stored on {target} within {PUBLISH_DEADLINE_S:.0f} s: {problem}")
            if self._connection.is_up:
                await asyncio.sleep(backoff_s * self._random.uniform(0.5, 1.5))
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            else:  # the wait for the server is the pause; then at once
                await self._connection.until_up(until_s - loop.time())

    async def _diagnose(self, stream: str, target: str) -> None:
        """Ask a stream that does not answer whether its disk is full. Raises `BusFull`.

        Server 2.15 answers no publish after a failed write, and stores nothing more until it is started again, even
        when there is space by then; other requests look healthy. Deleting a message that does not exist changes
        nothing in a sound stream, and tells the failure in a broken one.
        """
        body = json.dumps({"seq": NO_SUCH_SEQ, "no_erase": True}).encode()
        reply = await self._connection.request(f"$JS.API.STREAM.MSG.DELETE.{stream}", body, PUBLISH_TIMEOUT_S)
        words = (
            json.loads(reply.data).get("error", {}).get("description", "") if reply is not None and reply.data else ""
        )
        if any(full in words.lower() for full in FULL_WORDS):
            raise BusFull(
                f"The log cannot store more on {target}: {words}. Nothing acknowledged was lost. "
                "Free disk space and start the NATS server again: it stores nothing until then."
            )

    def _judge(self, target: str, error: dict[str, Any]) -> None:
        """Raise what no further try would mend."""
        code, words = error.get("err_code", 0), error["description"]
        if code == WRONG_LAST_SEQUENCE:
            raise WrongSequence(words)
        if code in NO_STORAGE or (code == STORE_FAILED and any(full in words.lower() for full in FULL_WORDS)):
            raise BusFull(
                f"The log cannot store more on {target}: {words}. Nothing was lost. "
                "Free disk space, purge what is finished and checkpointed, or raise the stream's bytes_max."
            )
        if code == ID_IN_PROCESS:
            return
        if 400 <= error["code"] < 500 and error["code"] not in (404, 408, 429):
            raise BusUnavailable(f"the server refuses messages on {target}: {words}")


def stored_at(reply: Incoming | None) -> int:
    """The sequence in a publish acknowledgement, 0 if it is an error or there was none."""
    if reply is None or not reply.data:
        return 0
    answer = json.loads(reply.data)
    return 0 if "error" in answer else int(answer["seq"])
