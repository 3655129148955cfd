"""The one source of time for actors, so that a simulation can give each of its processes a clock of its own.

Which clock holds is a context variable: a task takes it from whoever started it, and so do threads begun by
`asyncio.to_thread`. Nothing is decided by these readings: they are durations and times for people.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Final, Protocol

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class Clock(Protocol):
    """What a process can read about time and about itself."""

    def monotonic_s(self) -> float:
        """Seconds that only rise, for durations."""

    def wall_s(self) -> float:
        """Unix time; may be set forwards or backwards at any moment."""

    def cpu_s(self) -> float:
        """CPU seconds, user and system, of this process and of all that it has started, alive or ended. Only rises."""

    def process(self) -> str:
        """`host:pid`."""


class SystemClock:
    """The machine's."""

    def __init__(self) -> None:
        self._cpu_s = 0.0

    def monotonic_s(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def wall_s(self) -> float:
        """See `Clock`."""
        return time.time()

    def cpu_s(self) -> float:
        """See `Clock`. Heavy work may be done by children that live as long as we do, such as vLLM's."""
        total = sum(_ticks(child) for child in _started_by(os.getpid())) / _TICKS_PER_S
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            total += usage.ru_utime + usage.ru_stime
        self._cpu_s = max(self._cpu_s, total)  # a child may end between two of these readings
        return self._cpu_s

    def process(self) -> str:
        """See `Clock`."""
        return f"{socket.gethostname()}:{os.getpid()}"


def _started_by(process: int) -> Iterator[int]:
    """The living processes that one has started, and those that these have started. None where nobody tells."""
    for file in (_PROC / str(process) / "task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:  # the thread has just ended
            continue
        for child in map(int, children):
            yield child
            yield from _started_by(child)


def _ticks(process: int) -> int:
    """CPU time of a process and of its children that have ended; 0 if it is gone."""
    try:
        fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))


_SYSTEM: Final[Clock] = SystemClock()
_current: ContextVar[Clock] = ContextVar("clock", default=_SYSTEM)


def monotonic_s() -> float:
    """Seconds that only rise, for durations."""
    return _current.get().monotonic_s()


def wall_s() -> float:
    """Unix time in seconds."""
    return _current.get().wall_s()


def cpu_s() -> float:
    """CPU seconds of this process and of all that it has started."""
    return _current.get().cpu_s()


def process() -> str:
    """`host:pid` of this process."""
    return _current.get().process()


def use(clock: Clock) -> None:
    """From now on, whatever runs in this context reads this clock."""
    _current.set(clock)
