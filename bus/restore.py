"""Laying recorded entries down in a fresh run's streams: the same bytes and headers at the same sequences."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque
from typing import Any

from bus.connection import Connection, Incoming
from bus.port import BusUnavailable, Entry
from bus.publish import Publisher, WrongSequence, stored_at
from bus.table import PUBLISH_WINDOW_MESSAGES, Consumer, check_run_name, stream_name, subject
from schemas import UserError

API_TIMEOUT_S = 5.0


class Restorer:
    """Writes entries into a run that has been set up and that nobody else writes to. Pipelined: `flush` at the end.

    Of streams that keep only the newest message of a key the order is kept, not the sequences: what was replaced is not
    in a recording.
    """

    def __init__(self, run: str, url: str) -> None:
        self.run = check_run_name(run)
        self._connection = Connection(url, "restore")
        self._publisher = Publisher(self._connection)
        self._window: deque[tuple[Entry, asyncio.Future[Incoming | None]]] = deque()
        self._unanswered = False  # something in the window was: what is put now could take its place

    async def connect(self) -> None:
        """Connect. Raises `UserError` with the remedy."""
        await self._connection.connect()

    async def close(self) -> None:
        """Flush and disconnect."""
        await self._connection.close()

    async def begin(self, entry: Entry) -> None:
        """Let an empty stream begin at this entry's sequence: what was before it in the recorded run is purged."""
        if entry.seq > 1 and not entry.stream.newest_only:
            name = stream_name(self.run, entry.stream)
            await self._asked(f"STREAM.PURGE.{name}", {"seq": entry.seq})

    async def put(self, entry: Entry) -> None:
        """Store an entry, with the headers it had. Waits only if too much is on its way.

        Raises:
            UserError: it cannot be stored at its sequence.
            BusFull, BusUnavailable: it cannot be stored at all.
        """
        if len(self._window) >= PUBLISH_WINDOW_MESSAGES // 2:
            await self._settle_one()
        if self._unanswered:
            await self.flush()
        future = await self._publisher.post(subject(self.run, entry.stream, entry.key), entry.data, entry.headers)
        future.add_done_callback(self._note)
        self._window.append((entry, future))

    async def flush(self) -> None:
        """Wait until all that was put is stored."""
        while self._window:
            await self._settle_one()
        self._unanswered = False

    async def start_at(self, consumer: Consumer, seq: int, ack_wait_s: float) -> None:
        """Let a consumer's workers begin at this sequence: what is before it is done, as a fresh one cannot know."""
        name = stream_name(self.run, consumer.stream)
        reply = await self._asked(f"CONSUMER.INFO.{name}.{consumer.name}", {})
        config = reply["config"] | {"deliver_policy": "by_start_sequence", "opt_start_seq": seq}
        config["ack_wait"] = int(ack_wait_s * 1e9)
        await self._asked(f"CONSUMER.DELETE.{name}.{consumer.name}", {})
        body = {"stream_name": name, "action": "create", "config": config}
        await self._asked(f"CONSUMER.CREATE.{name}.{consumer.name}", body)

    def _note(self, future: asyncio.Future[Incoming | None]) -> None:
        self._unanswered |= future.cancelled() or future.result() is None

    async def _settle_one(self) -> None:
        """Wait until the oldest that was put is stored, with further tries if its first was lost."""
        entry, future = self._window.popleft()
        seq = stored_at(await future)
        if not seq:
            name, target = stream_name(self.run, entry.stream), subject(self.run, entry.stream, entry.key)
            try:
                seq = (await self._publisher.store(name, target, entry.data, entry.headers)).seq
            except WrongSequence as error:  # an earlier try of a fenced message was stored, or the stream is not fresh
                seq = await self._standing(entry)
                if not seq:
                    raise self._misplaced(entry, str(error)) from None
        if seq != entry.seq and not entry.stream.newest_only:
            raise self._misplaced(entry, f"the server stored it, or took it for a repetition, at {seq}")

    async def _standing(self, entry: Entry) -> int:
        """The entry's sequence if it stands there already, else 0."""
        answer = await self._asked(f"STREAM.MSG.GET.{stream_name(self.run, entry.stream)}", {"seq": entry.seq})
        return entry.seq if base64.b64decode(answer["message"].get("data", "")) == entry.data else 0

    def _misplaced(self, entry: Entry, why: str) -> UserError:
        return UserError(
            f"Entry {entry.seq} of the {entry.stream.name} cannot be laid down at its place: {why}.",
            "The run must be fresh, and nobody else may write to these streams; a damaged recording has gaps.",
        )

    async def _asked(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._connection.request(f"$JS.API.{what}", json.dumps(body).encode(), API_TIMEOUT_S)
        if reply is None or not reply.data:
            raise BusUnavailable(f"no answer to {what} within {API_TIMEOUT_S:.0f} s")
        answer: dict[str, Any] = json.loads(reply.data)
        if "error" in answer:
            raise BusUnavailable(f"{what}: {answer['error'].get('description', 'refused')}")
        return answer
