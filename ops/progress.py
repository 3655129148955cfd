"""How far a long work is, on standard error, and how it is stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator

TERMINAL_EVERY_S = 0.2
PLAIN_EVERY_S = 10.0


class Progress:
    """`replaying: 12 of 30, 14 s left`: one line that changes on a terminal, a line now and then elsewhere.

    `total` may be set when it is known.
    """

    def __init__(self, what: str, total: int = 0, shown: bool = True) -> None:
        self.total = total
        self._what = what
        self._shown = shown
        self._terminal = sys.stderr.isatty()
        self._began_s = self._told_s = time.monotonic()
        self._first: int | None = None
        self._written = False

    def show(self, done: int) -> None:
        """So many of the total are done."""
        now_s = time.monotonic()
        if self._first is None:
            self._first, self._began_s = done, now_s
        every_s = TERMINAL_EVERY_S if self._terminal else PLAIN_EVERY_S
        if not self._shown or now_s - self._told_s < every_s:
            return
        self._told_s = now_s
        made = done - self._first
        left = f", {(now_s - self._began_s) / made * (self.total - done):.0f} s left" if made else ""
        text = f"{self._what}: {done:,} of {self.total:,}{left}"
        sys.stderr.write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")
        sys.stderr.flush()
        self._written = self._terminal

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._written:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextlib.contextmanager
def stopped_by_ctrl_c() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C sets; a second one interrupts as usual."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
