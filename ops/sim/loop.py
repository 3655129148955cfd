"""An event loop whose time is simulated: nothing waits, the clock jumps to whatever is due next.

Callbacks due at the same time run in the order in which they were scheduled, threads are replaced by delays, and no
reading of the machine's clock enters. So a run whose other choices come from one seed repeats exactly.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits for another one, and nothing is due that could wake any."""


class _NothingReady(selectors.BaseSelector):
    """Selects no file ever; asked to wait, it moves the clock instead."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"nothing is scheduled any more, at {self.now_s:.3f} s")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and is virtual.

    `thread_s()` gives the seconds that a call in a thread takes before its effect and after it; by default none. A
    call's effect happens all at once in between, whether or not anybody still waits for it, as with real threads.
    """

    def __init__(self, thread_s: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)) -> None:
        self._nothing_ready = _NothingReady()
        super().__init__(self._nothing_ready)
        self.thread_s = thread_s

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._nothing_ready.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Call `func` after a delay, on this very thread; the future is done after another."""
        before_s, after_s = self.thread_s()
        future: asyncio.Future[T] = self.create_future()

        def call() -> None:
            result, error = None, None
            try:
                result = func(*args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as raised:
                error = raised
            self.call_later(after_s, settle, future, result, error)

        self.call_later(before_s, call)
        return future


def settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    """Give a future what came of a call, unless it was cancelled meanwhile."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def run_virtual(work: Coroutine[Any, Any, T], loop: VirtualLoop | None = None) -> tuple[T, float]:
    """Run `work` to its end; returns its result and the virtual seconds that it took.

    Raises:
        Deadlock: it can never end.
    """
    loop = loop or VirtualLoop()
    try:
        return loop.run_until_complete(work), loop.time()
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
