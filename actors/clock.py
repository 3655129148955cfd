"""The one source of time for actors, so that a simulation can give each of its processes a clock of its own.

Which clock holds is a context variable: a task takes it from whoever started it, and so do threads begun by
`asyncio.to_thread`. Nothing is decided by these readings: they are durations and times for people.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from contextvars import ContextVar
from typing import Final, Protocol


class Clock(Protocol):
    """What a process can read about time and about itself."""

    def monotonic_s(self) -> float:
        """Seconds that only rise, for durations."""

    def wall_s(self) -> float:
        """Unix time; may be set forwards or backwards at any moment."""

    def cpu_s(self) -> float:
        """CPU seconds, user and system, of this process and of its children that have ended."""

    def process(self) -> str:
        """`host:pid`."""


class SystemClock:
    """The machine's."""

    def monotonic_s(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def wall_s(self) -> float:
        """See `Clock`."""
        return time.time()

    def cpu_s(self) -> float:
        """See `Clock`."""
        total = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            total += usage.ru_utime + usage.ru_stime
        return total

    def process(self) -> str:
        """See `Clock`."""
        return f"{socket.gethostname()}:{os.getpid()}"


_SYSTEM: Final[Clock] = SystemClock()
_current: ContextVar[Clock] = ContextVar("clock", default=_SYSTEM)


def monotonic_s() -> float:
    """Seconds that only rise, for durations."""
    return _current.get().monotonic_s()


def wall_s() -> float:
    """Unix time in seconds."""
    return _current.get().wall_s()


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return _current.get().cpu_s()


def process() -> str:
    """`host:pid` of this process."""
    return _current.get().process()


def use(clock: Clock) -> None:
    """From now on, whatever runs in this context reads this clock."""
    _current.set(clock)
