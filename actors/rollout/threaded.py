"""Runs a decoder in a thread of its own behind the asyncio `Engine`.

    loop thread                                        decoder thread
    generate(), update(), ... ── _post ──▶ inbox ──▶   carry out commands, load, admit, step
    their futures ◀── _deliver, once a turn ── outbox ◀──  results of that turn

The loop never waits for a forward pass, the thread sleeps when nothing runs, and each side crosses over once a turn
however many samples are concerned. Everything that touches the decoder runs in the thread, but for what is made for it:
`check`, `lengths`, `tokens` and `snapshot`.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.rollout.engine import EngineClosedError, EngineStats, Generation, Request
from actors.rollout.load_weights import ReadWeights
from actors.rollout.torch_engine import Decoder

_Command = Callable[[], None]

# A full batch lets new sequences in, and finished ones out, this often. Each admission costs a forward of its own and
# each delivery wakes the loop, which competes for the interpreter: done after every 2 ms step of a small model, both
# cost as much as the decoding. A large model takes longer than this for a step and notices nothing.
TURN_S = 0.010


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    request: Request
    future: asyncio.Future[Generation]


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    version: int
    weights: ReadWeights
    future: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Result:
    future: asyncio.Future[Any]
    value: Any = None
    error: Exception | None = None


class ThreadedEngine:
    """`engine.Engine` over a `Decoder`. All methods belong to the loop that awaited `start`, but for `lengths`,
    `tokens` and `snapshot`.

    With on_update "drain", waiting requests stay out of the batch from when the weights are read until they are held.
    An exception in the thread is raised by every pending call and by all later ones, as it is.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._thread = threading.Thread(target=self._run, name="rollstream-decoder", daemon=True)
        # Of the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._staged: list[_Command] = []
        self._pending: set[asyncio.Future[Any]] = set()
        self._generating = 0
        self._handed_over = False
        self._reading = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._broken = asyncio.Event()  # _error is set
        # Of both, under _wake
        self._wake = threading.Condition()
        self._inbox: list[_Command] = []
        # Of the thread
        self._waiting: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}
        self._updates: deque[_Update] = deque()
        self._outbox: list[_Result] = []
        self._open = True
        self._turned_s = 0.0

    @property
    def version(self) -> int:
        """See `Engine`."""
        return self._decoder.version

    @property
    def slots(self) -> int:
        """See `Engine`."""
        return self._decoder.slots

    async def start(self) -> None:
        """Start the thread. Once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def generate(self, request: Request) -> Generation:
        """See `Engine`."""
        loop = self._serving()
        complete = self._decoder.check(request)
        if complete is not None:
            return complete
        if self._handed_over:
            return request.unfinished()
        job = _Job(request, self._expect(loop))
        self._generating += 1
        self._post(loop, partial(self._waiting.append, job))
        try:
            return await job.future
        except asyncio.CancelledError:
            self._post(loop, partial(self._forget, job))
            raise
        finally:
            self._generating -= 1

    async def update(self, version: int, path: str | Path, base: str | Path | None = None) -> None:
        """See `Engine`. Updates are carried out one after another, in the order of the calls.

        The weights are read while samples go on; only writing them into the model stops the decoding.
        """
        self._serving()
        async with self._reading:
            weights = await asyncio.to_thread(self._decoder.read, path, base)
            loop = self._serving()
            update = _Update(version, weights, self._expect(loop))
            self._post(loop, partial(self._updates.append, update))
        await update.future

    def lengths(self) -> dict[str, int]:
        """See `Engine`."""
        return self._decoder.lengths()

    def tokens(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """See `Engine`."""
        return self._decoder.tokens(starts)

    def snapshot(self, sample_id: str) -> Generation | None:
        """See `Engine`."""
        return self._decoder.snapshot(sample_id)

    async def failed(self) -> None:
        """See `Engine`."""
        await self._broken.wait()
        assert self._error is not None
        raise self._error

    async def hand_over(self) -> None:
        """See `Engine`."""
        loop = self._serving()
        self._handed_over = True
        future = self._expect(loop)
        self._post(loop, partial(self._release, future))
        await future

    async def close(self) -> None:
        """See `Engine`. Returns when the thread has ended."""
        if self._loop is None:
            return
        if self._closing is None:
            self._closing = self._expect(self._loop)
            if self._error is None:
                self._post(self._loop, partial(self._stop, self._closing))
            else:
                self._closing.set_result(None)
        await asyncio.wait([self._closing])
        self._closing.exception()  # a thread that fails while it stops has told the pending calls already
        self._thread.join()

    def stats(self) -> EngineStats:
        """See `Engine`."""
        decoder, running = self._decoder, self._decoder.running
        return EngineStats(
            running=running,
            waiting=max(0, self._generating - running),
            tokens_generated=decoder.tokens_generated,
            forward_passes=decoder.forward_passes,
            busy_s=decoder.busy_s,
            swapping_s=decoder.swapping_s,
            prefill_tokens=decoder.prefill_tokens,
            cached_tokens=decoder.cached_tokens,
            rebuilding=decoder.rebuilding,
            rebuilding_s=decoder.rebuilding_s,
        )

    # In the loop

    def _serving(self) -> asyncio.AbstractEventLoop:
        if self._error is not None:
            raise self._error
        if self._loop is None or self._closing is not None:
            raise EngineClosedError("the engine is closed" if self._closing else "the engine was not started")
        return self._loop

    def _expect(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        """A future that fails if the thread does."""
        future: asyncio.Future[Any] = loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def _post(self, loop: asyncio.AbstractEventLoop, command: _Command) -> None:
        """Send a command with all others of this turn of the loop: a batch that arrives together starts together."""
        if not self._staged:
            loop.call_soon(self._flush)
        self._staged.append(command)

    def _flush(self) -> None:
        with self._wake:
            self._inbox += self._staged
            self._wake.notify()
        self._staged = []

    @staticmethod
    def _deliver(results: list[_Result]) -> None:
        for result in results:
            if result.future.done():  # its caller was cancelled
                continue
            if result.error is None:
                result.future.set_result(result.value)
            else:
                result.future.set_exception(result.error)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._broken.set()
        for future in self._pending:
            if not future.done():
                future.set_exception(error)

    # In the thread

    def _run(self) -> None:
        try:
            while self._open:
                self._obey()
                self._load_updates()
                turn = self._turn_is_due()
                if turn and not self._updates and not self._decoder.rebuilding:
                    self._admit()
                for ticket, generation in self._decoder.step():
                    self._outbox.append(_Result(self._running.pop(ticket).future, generation))
                if self._outbox and (turn or not self._decoder.running):
                    self._call_loop(self._deliver, self._outbox)
                    self._outbox = []
        except BaseException as error:
            self._call_loop(self._fail, error)

    def _turn_is_due(self) -> bool:
        """At once while the batch is less than half full: then there is room to fill, or a last sample to wait for."""
        now_s = time.monotonic()
        if now_s - self._turned_s < TURN_S and 2 * self._decoder.running >= self._decoder.slots:
            return False
        self._turned_s = now_s
        return True

    def _call_loop(self, call: Callable[[Any], None], argument: Any) -> None:
        assert self._loop is not None  # set by start, before the thread
        try:
            self._loop.call_soon_threadsafe(call, argument)
        except RuntimeError:  # the loop was closed: nobody is left to generate for
            self._open = False

    def _obey(self) -> None:
        """Carry out the commands at hand; sleep until there are some if there is nothing else to do."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._waiting or self._updates or self._decoder.running)
            commands, self._inbox = self._inbox, []
        for command in commands:
            command()

    def _load_updates(self) -> None:
        while self._updates and not (self._decoder.config.on_update == "drain" and self._decoder.running):
            update = self._updates.popleft()
            self._decoder.take(update.version, update.weights)
            self._outbox.append(_Result(update.future))

    def _admit(self) -> None:
        """Fill free slots in order of arrival, but with one forward's worth of prompts a turn, lest the others wait."""
        jobs: list[_Job] = []
        tokens = 0
        while self._waiting and len(jobs) < self._decoder.slots - self._decoder.running:
            known = self._waiting[0].request.unfinished()
            tokens += len(known.prompt_tokens) + len(known.tokens)
            if jobs and tokens > self._decoder.config.prefill_tokens:
                break
            jobs.append(self._waiting.popleft())
        if jobs:
            tickets = self._decoder.add([job.request for job in jobs])
            self._running.update(zip(tickets, jobs, strict=True))

    def _forget(self, job: _Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        for ticket, running in self._running.items():
            if running is job:
                self._decoder.remove(ticket)
                del self._running[ticket]
                break

    def _release(self, future: asyncio.Future[None]) -> None:
        for ticket, generation in self._decoder.clear():
            self._outbox.append(_Result(self._running.pop(ticket).future, generation))
        self._outbox += [_Result(job.future, job.request.unfinished()) for job in self._waiting]
        self._waiting.clear()
        self._outbox.append(_Result(future))

    def _stop(self, future: asyncio.Future[None]) -> None:
        self._release(future)
        self._open = False
