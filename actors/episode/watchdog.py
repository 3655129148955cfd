"""Notices from outside of the event loop that a call of the user's blocks it, names the line, and ends the call.

An async function that calls `time.sleep`, or asks a database without awaiting, holds up all episodes of its worker, its
beats and its acknowledgements. A thread sees that the loop stands still, and tells in the log where. After `limit_s` it
interrupts the call with a signal, whose handler raises `HeldUp` in the user's line: its episode is dropped, as a
timeout. A call that heeds no signal, in compiled code, is ended together with the process: see `deaths`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import structlog

from actors.episode.policy import GivenUp
from actors.episode.running import Running
from actors.lines import their_line

log = structlog.get_logger()

LOOK_S = 0.25
NOTICED_S = 2.0  # a loop that stands still for less is none of our business
GRACE_S = 5.0  # after the interruption; then the process is ended
SIGNAL = signal.SIGUSR1
EXIT_HELD_UP = 75
LOOPS = frozenset(module.__file__ for module in (asyncio.events, asyncio.base_events, asyncio.runners))


class HeldUp(GivenUp):
    """An episode held up all others."""

    def __init__(self, seconds: float, where: str) -> None:
        super().__init__("timeout", f"{held_up(seconds, where)}: await what takes long, or use asyncio.to_thread")


def held_up(seconds: float, where: str) -> str:
    """`it held up all other episodes for 10 s at task.py, line 12`."""
    return f"it held up all other episodes for {seconds:.0f} s at {where}"


class Watchdog:
    """Watches the running event loop, entered and left in it: `with Watchdog(...)`. Elsewhere than in the main thread,
    where no signal arrives, it only tells."""

    def __init__(self, running: Running, limit_s: float, name: str) -> None:
        self._running = running
        self._limit_s = limit_s
        self._name = name
        self._beats = 0
        self._interrupted = -1  # at this beat
        self._blocked_s = 0.0
        self._stopped = threading.Event()
        self._watched = threading.get_ident()
        self._interrupts = threading.current_thread() is threading.main_thread()
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._watch, name=f"watches the loop of {name}", daemon=True)

    def __enter__(self) -> None:
        self._beat()
        if self._interrupts:
            self._before = signal.signal(SIGNAL, self._interrupt)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join()
        if self._interrupts:
            signal.signal(SIGNAL, self._before or signal.SIG_DFL)

    def _beat(self) -> None:
        self._beats += 1
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._beat)

    def _watch(self) -> None:
        seen, looked_s, told = self._beats, time.monotonic(), False
        while not self._stopped.wait(LOOK_S):
            now_s = time.monotonic()
            passed_s, looked_s = min(now_s - looked_s, 2 * LOOK_S), now_s  # if we were stopped ourselves: not its fault
            if self._beats != seen:
                seen, self._blocked_s, told = self._beats, 0.0, False
                continue
            self._blocked_s += passed_s
            if self._blocked_s < NOTICED_S:
                continue
            where = their_line(lines_of(sys._current_frames().get(self._watched)))
            if not told:
                told = True
                event = "episode_blocks" if where else "worker_blocked"
                log.warning(event, worker=self._name, sample=self._running.now, where=where, for_s=self._blocked_s)
            if where and self._interrupts:
                self._end(where, seen)

    def _end(self, where: str, seen: int) -> None:
        """Interrupt the call once it is time, and again if it swallows that; if it is of no use, end the process."""
        if self._limit_s <= self._blocked_s < self._limit_s + GRACE_S:
            self._interrupted = seen
            signal.pthread_kill(self._watched, SIGNAL)
        elif self._blocked_s >= self._limit_s:
            log.error("worker_ended_itself", worker=self._name, sample=self._running.now, where=where)
            self._running.say(f"was ended, since {held_up(self._blocked_s, where)}")
            os._exit(EXIT_HELD_UP)

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        """In the watched thread, in the midst of what it does: raise, if that is still the user's call."""
        where = their_line(lines_of(frame))
        if where and self._beats == self._interrupted and not self._stopped.is_set():
            raise HeldUp(self._blocked_s, where)


def lines_of(frame: FrameType | None) -> list[tuple[str, int | None]]:
    """The files and lines of a stack within the event loop, the innermost last."""
    return list(_outwards(frame))[::-1]


def _outwards(frame: FrameType | None) -> Iterator[tuple[str, int | None]]:
    while frame is not None and frame.f_code.co_filename not in LOOPS:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
