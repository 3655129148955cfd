"""A pool of sandboxes that are started ahead, each used for one program and then replaced."""

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from subprocess import Popen
from types import TracebackType

from actors.reward.sandbox.child import START_TIMEOUT_S, Child
from actors.reward.sandbox.launch import ALLOW, Launcher
from actors.reward.sandbox.limits import Call, Limits, Result, SandboxLost
from schemas.errors import UserError

ATTEMPTS = 3
LOOK_S = 0.5  # between two looks whether one who waits for a place was cancelled
WAIT_S = 600.0  # for a free place; programs are bounded, so a longer wait is a bug


class Sandbox:
    """Runs programs that nobody trusts. At most `children` at once; as many wait ready.

    From a coroutine `await sandbox.run(program, stdin)`; from a thread `sandbox.run_blocking(program, stdin)`, or
    `with sandbox.borrow() as box: box.run(...)` for several runs of one program. `start` before, `close` after; or
    `with Sandbox() as sandbox`.
    """

    def __init__(self, limits: Limits | None = None, children: int = 2) -> None:
        self.limits = limits or Limits()
        self._children = children
        self._places = threading.BoundedSemaphore(children)
        self._launcher: Launcher | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._ordered: deque[Future[Popen[bytes]]] = deque()
        self._lent: set[Box] = set()

    def start(self) -> None:
        """Run a program of one line. Raises `UserError`, with the remedy, where this machine cannot isolate."""
        self._launcher = Launcher(self.limits.tmp_bytes)
        self._threads = ThreadPoolExecutor(self._children, "sandbox")
        try:
            found = self.run_blocking("print(6 * 7)", limits=replace(self.limits, time_s=30.0))
        except SandboxLost as error:
            self.close()
            raise UserError(f"Code cannot be isolated on this machine: {error}.", ALLOW) from error
        except BaseException:
            self.close()
            raise
        if (found.status, found.stdout) != ("ok", "42\n"):
            self.close()
            last = found.stderr.strip().rpartition("\n")[2][:200]
            raise UserError(
                f"The sandbox fails with these limits: print(6 * 7) gave {found.status}{last and ': '}{last}.",
                "Raise the limits, of memory first.",
            )

    async def run(
        self, program: str, stdin: str = "", *, call: Call | None = None, limits: Limits | None = None
    ) -> Result:
        """What came of `program`, given `stdin`. Cancelled, it kills the program.

        Raises `SandboxLost` if it was killed from outside, or its sandbox died, three times.
        """
        assert self._threads is not None, "start the sandbox before"
        box = Box(self)
        done = asyncio.get_running_loop().run_in_executor(self._threads, box.run_once, program, stdin, call, limits)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            box.cancel()
            done.cancel()  # if it has not begun
            with contextlib.suppress(SandboxLost, asyncio.CancelledError):
                await done
            raise

    def run_blocking(
        self, program: str, stdin: str = "", *, call: Call | None = None, limits: Limits | None = None
    ) -> Result:
        """As `run`, for threads."""
        with self.borrow() as box:
            return box.run(program, stdin, call=call, limits=limits)

    @contextlib.contextmanager
    def borrow(self) -> Iterator["Box"]:
        """A box for several runs of one program: a sandbox serves until something is left in it."""
        box = Box(self)
        with box.open():
            yield box

    def close(self) -> None:
        """Kill all programs and end. May be called twice."""
        with self._lock:
            launcher, self._launcher = self._launcher, None
            lent, ordered = list(self._lent), list(self._ordered)
            self._ordered.clear()
        for box in lent:
            box.cancel()
        if launcher is not None:
            launcher.close()
        for future in ordered:
            if not future.cancelled() and future.exception() is None:
                Child(future.result()).close()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Sandbox":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _take(self) -> Child:
        """A sandbox that was started ahead."""
        while True:
            with self._lock:
                if self._launcher is None:
                    raise SandboxLost("the sandbox is closed")
                if not self._ordered:
                    self._ordered.append(self._launcher.order())
                future = self._ordered.popleft()
            try:
                child = Child(future.result(START_TIMEOUT_S))
            except OSError as error:
                if not future.done():  # it may come yet
                    with self._lock:
                        self._ordered.append(future)
                raise SandboxLost(f"no sandbox could be started: {error}") from error
            if child.alive:  # it may have been killed while it waited, which says nothing about any program
                return child
            child.close()

    def _end(self, child: Child) -> None:
        """Have others started in its place, now that no program of its wants the cores, and end it."""
        with self._lock:
            if self._launcher is not None:
                while len(self._ordered) < self._children + 1:
                    self._ordered.append(self._launcher.order())
                self._launcher.later(child.close)
                return
        child.close()


class Box:
    """A place in the pool, with at most one sandbox at a time. Use it from one thread; `cancel` from any."""

    def __init__(self, pool: Sandbox) -> None:
        self._pool = pool
        self._child: Child | None = None
        self._cancelled = False

    def run(
        self,
        program: str,
        stdin: str = "",
        *,
        call: Call | None = None,
        limits: Limits | None = None,
        until: float = math.inf,
    ) -> Result:
        """Run it. If it is killed from outside, or its sandbox dies, it is run again in a fresh one, at most twice.

        Each run has the whole time of its limits, or is not begun if that would end after `until`, a reading of
        `time.monotonic`. Raises `SandboxLost`.
        """
        lost = 0
        limits = limits or self._pool.limits
        while True:
            try:
                if self._child is None:
                    self._child = self._pool._take()
                if self._cancelled:
                    raise SandboxLost("the run was cancelled")
                result = self._child.run(program, stdin, call, limits)
            except SandboxLost as error:
                if self._child is not None:
                    self._child.kill()
                self._drop()
                lost += 1
                if lost == ATTEMPTS or self._cancelled:
                    raise
                time.sleep(0.05 * lost)
                if time.monotonic() + limits.time_s > until:
                    raise SandboxLost(f"{error}; this call has too little time left to run it again") from error
            else:
                if not self._child.clean:
                    self._drop()
                return result

    def run_once(self, program: str, stdin: str, call: Call | None, limits: Limits | None) -> Result:
        """Take a place, run, and give it back."""
        with self.open():
            return self.run(program, stdin, call=call, limits=limits)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Hold a place of the pool."""
        end = time.monotonic() + WAIT_S
        while not self._pool._places.acquire(timeout=LOOK_S):
            if self._cancelled or self._pool._launcher is None or time.monotonic() > end:
                raise SandboxLost("no place in the sandbox became free")
        try:
            with self._pool._lock:
                self._pool._lent.add(self)
            yield
        finally:
            self._drop()
            with self._pool._lock:
                self._pool._lent.discard(self)
            self._pool._places.release()

    def cancel(self) -> None:
        """Kill what runs; whoever waits for it gets `SandboxLost`."""
        self._cancelled = True
        if (child := self._child) is not None:
            child.kill()

    def _drop(self) -> None:
        """End the sandbox; whoever waits for a result does not wait for that."""
        child, self._child = self._child, None
        if child is not None:
            self._pool._end(child)
