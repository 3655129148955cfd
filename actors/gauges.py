"""What an actor tells about itself every second: CPU, how idle and why, and the gauges of its role.

Gauges are for people. They go over core NATS, may be lost, and nothing is decided by them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bus.port import Bus
from bus.table import BEAT_EVERY_S


def cpu_seconds() -> float:
    """CPU seconds, user and system, of this process and of its children that have ended."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


class Gauges:
    """The heartbeat of one actor. `waiting(why)` brackets the times in which it has nothing to do."""

    def __init__(self, bus: Bus, actor: str, role: str, read: Callable[[], Mapping[str, Any]] = dict) -> None:
        self.bus = bus
        self.actor = actor
        self.role = role
        self.read = read
        self.state = "starting"
        self._waits: dict[str, float] = {}  # seconds since the last beat, by cause
        self._open: tuple[str, float] | None = None
        self._beat_at = time.monotonic()
        self.idle_s = 0.0
        self.started_at = time.monotonic()
        self.span_s = BEAT_EVERY_S  # that the last beat covered

    def pause(self, why: str) -> None:
        """From now on it has nothing to do, for this reason."""
        self.resume()
        self._open = (why, time.monotonic())
        self.state = f"waiting for {why}"

    def resume(self) -> None:
        """It has something to do again."""
        self._close(time.monotonic())
        self._open = None
        self.state = "working"

    @contextlib.contextmanager
    def waiting(self, why: str) -> Iterator[None]:
        """Time inside counts as idle, for this reason. Not to be nested."""
        self.pause(why)
        try:
            yield
        finally:
            self.resume()

    def _close(self, now: float) -> None:
        if self._open is not None:
            why, since = self._open
            self._waits[why] = self._waits.get(why, 0.0) + now - since
            self.idle_s += now - since
            self._open = (why, now)

    @property
    def alive_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self.started_at

    def beat_now(self) -> dict[str, Any]:
        """The gauges since the last beat."""
        now = time.monotonic()
        self._close(now)
        span = self.span_s = max(1e-9, now - self._beat_at)
        self._beat_at = now
        idle = sum(self._waits.values())
        why = max(self._waits, key=self._waits.__getitem__, default="")
        self._waits = {}
        return {
            "actor": self.actor,
            "role": self.role,
            "process": f"{socket.gethostname()}:{os.getpid()}",
            "cpu_s": round(cpu_seconds(), 3),
            "state": self.state,
            "idle_share": round(min(1.0, idle / span), 3),
            "idle_why": why,
            "idle_s": round(self.idle_s, 3),
            "alive_s": round(now - self.started_at, 3),
            **self.read(),
        }

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            await self.bus.beat(self.beat_now())
            await asyncio.sleep(BEAT_EVERY_S)

    @contextlib.asynccontextmanager
    async def beating(self) -> Any:
        """Beat in the background, and a last time at the end."""
        task = asyncio.create_task(self.run(), name=f"beats of {self.actor}")
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self.state = "ended"
            await self.bus.beat(self.beat_now())
