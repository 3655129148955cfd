"""Limits that all reward processes of one worker share: how many calls run at once, and how many start in a minute.

The state is a file in memory, whose descriptor the processes inherit: locks of byte ranges are the places, which the
kernel frees when a process dies, however it dies; eight bytes behind a lock hold when the next call may start.
"""

import fcntl
import os
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

PLACES_MAX = 256
_NEXT = struct.Struct("<d")
_CLOCK_AT, _CLOCK_LOCK = 0, PLACES_MAX  # byte offsets; byte i below is the lock of place i
_LOOK_S = 0.01


class NoRoom(Exception):
    """The limits leave no room within the time that there is."""


def open_shared() -> int:
    """A descriptor for all processes of a worker; to be closed by who opened it."""
    shared = os.memfd_create("rollstream-throttle")
    os.pwrite(shared, _NEXT.pack(0.0), _CLOCK_AT)
    return shared


class Throttle:
    """One process's view of the limits; `shared` None limits this process alone."""

    def __init__(self, shared: int | None, places: int | None, per_minute: float | None) -> None:
        self._shared = open_shared() if shared is None else shared
        if shared is None:
            weakref.finalize(self, os.close, self._shared)
        self._places = places
        self._gap_s = 60.0 / per_minute if per_minute else 0.0

    @contextmanager
    def place(self, until_s: float) -> Iterator[None]:
        """Hold one of the places. Raises `NoRoom` if none is free by `until_s` of the monotonic clock."""
        if self._places is None:
            yield
            return
        taken = self._take(until_s)
        try:
            yield
        finally:
            fcntl.lockf(self._shared, fcntl.LOCK_UN, 1, taken)

    def start(self, until_s: float) -> None:
        """Wait for the next time at which a call may start. Raises `NoRoom` if that is after `until_s`."""
        with self._clock():
            now = time.monotonic()
            start = max(now, self._next())
            if start > until_s:
                raise NoRoom(f"the rate limit leaves no room for {start - now:.1f} s")
            if self._gap_s:
                os.pwrite(self._shared, _NEXT.pack(start + self._gap_s), _CLOCK_AT)
        time.sleep(max(0.0, start - now))

    def hold(self, seconds: float) -> None:
        """Let nobody start for so long: the server asked for it."""
        with self._clock():
            os.pwrite(self._shared, _NEXT.pack(max(self._next(), time.monotonic() + seconds)), _CLOCK_AT)

    def _take(self, until_s: float) -> int:
        assert self._places is not None
        while True:
            for place in range(self._places):
                try:
                    fcntl.lockf(self._shared, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                except OSError:
                    continue
                return place
            if time.monotonic() >= until_s:
                raise NoRoom(f"all {self._places} places for calls are taken")
            time.sleep(_LOOK_S)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        fcntl.lockf(self._shared, fcntl.LOCK_EX, 1, _CLOCK_LOCK)
        try:
            yield
        finally:
            fcntl.lockf(self._shared, fcntl.LOCK_UN, 1, _CLOCK_LOCK)

    def _next(self) -> float:
        found: float = _NEXT.unpack(os.pread(self._shared, _NEXT.size, _CLOCK_AT))[0]
        return found
