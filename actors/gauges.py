"""What an actor tells about itself every second: CPU, how idle and why, and the gauges of its role.

Gauges are for people. They go over core NATS, may be lost, and nothing is decided by them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from actors import clock
from bus.port import Bus
from bus.table import BEAT_EVERY_S


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
        self._beat_at = clock.monotonic_s()
        self.idle_s = 0.0
        self.started_at = clock.monotonic_s()
        self.span_s = BEAT_EVERY_S  # that the last beat covered

    def pause(self, why: str) -> None:
        """From now on it has nothing to do, for this reason."""
        self.resume()
        self._open = (why, clock.monotonic_s())
        self.state = f"waiting for {why}"

    def resume(self) -> None:
        """It has something to do again."""
        self._close(clock.monotonic_s())
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
        return clock.monotonic_s() - self.started_at

    def beat_now(self) -> dict[str, Any]:
        """The gauges since the last beat."""
        now = clock.monotonic_s()
        self._close(now)
        span = self.span_s = max(1e-9, now - self._beat_at)
        self._beat_at = now
        idle = sum(self._waits.values())
        why = max(self._waits, key=self._waits.__getitem__, default="")
        self._waits = {}
        return {
            "actor": self.actor,
            "role": self.role,
            "process": clock.process(),
            "cpu_s": round(clock.cpu_s(), 3),
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
