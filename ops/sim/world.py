"""The simulated machine room: processes that can be killed, stopped and started again, a disk, and what everybody did.

A process is a context: every task, timer and thread that its actors start carries it. Killed, its tasks are cancelled,
and from that instant nothing that they still do, in `finally` blocks too, has any effect outside: each way out, the log
and the disk, first asks `Process.ready`. Stopped (SIGSTOP), it waits there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeVar

from actors import clock
from bus.memory import MemoryHub
from bus.port import Entry
from ops.sim.loop import VirtualLoop, settle
from ops.sim.scenario import AT_CALL, Dice, Scenario

T = TypeVar("T")

RUN: Final = "sim"
EPOCH_S: Final = 1_700_000_000.0
STOPPED_S: Final = 6.0  # mean
TRACE_MAX: Final = 400  # lines kept, unless all are asked for


class Killed(BaseException):
    """Ends what a killed process still does. No `except Exception` of an actor may catch it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: the invariant's name, what happened, and when (virtual seconds)."""

    invariant: str
    what: str
    time_s: float

    def __str__(self) -> str:
        return f"{self.invariant} at {self.time_s:.3f} s: {self.what}"


class Process:
    """One life of a process. `number` tells it from those of the same name before it."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world = world
        self.name = name
        self.number = number
        self.label = f"{name}#{number}"
        self.dice = world.dice.of(self.label)
        self.dead = False
        self.stopped = False
        self.cut_until_s = 0.0  # reaches the log again then
        self.went_on_s = 0.0  # after it was last stopped
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.stop = asyncio.Event()  # SIGTERM
        self.handed_over: list[tuple[str, int]] = []  # sample ids and tokens that its engine returned unfinished
        self.clock = ProcessClock(self)
        self.held: list[Callable[[], None]] = []
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self.context.run(clock.use, self.clock)

    def __str__(self) -> str:
        return self.label

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of this process."""
        return self.world.loop.create_task(work, context=self.context.copy())

    async def ready(self) -> None:
        """Pass if the process runs, wait while it is stopped. Raises `Killed`."""
        while self.stopped and not self.dead:
            future: asyncio.Future[None] = self.world.loop.create_future()
            self.held.append(lambda future=future: None if future.done() else future.set_result(None))  # type: ignore[misc]
            await future
        if self.dead:
            raise Killed

    def when_running(self, call: Callable[[], None]) -> None:
        """Call now, or when the process goes on; never if it is killed."""
        if self.stopped:
            self.held.append(call)
        elif not self.dead:
            call()

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped = False
        self.went_on_s = self.world.loop.time()
        held, self.held = self.held, []
        for call in held:
            self.context.copy().run(call)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class ProcessClock:
    """A process's clock: its wall clock is set apart from the others', and may be set again; see `actors.clock`."""

    def __init__(self, process: Process) -> None:
        dice = process.dice("clock")
        self._process = process
        self._started_s = dice.uniform(0.0, 1e6)
        self.skew_s = dice.gauss(0.0, 5.0)

    def monotonic_s(self) -> float:
        """See `actors.clock.Clock`."""
        return self._started_s + self._process.world.loop.time()

    def wall_s(self) -> float:
        """See `actors.clock.Clock`."""
        return EPOCH_S + self._process.world.loop.time() + self.skew_s

    def cpu_s(self) -> float:
        """See `actors.clock.Clock`."""
        return self._process.world.loop.time()

    def process(self) -> str:
        """See `actors.clock.Clock`."""
        return f"{self._process.name}:{self._process.number}"


class _Loop(VirtualLoop):
    """Gives each process its own tasks, and its threads the delays and deaths of a disk."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.set_task_factory(self._task)  # type: ignore[arg-type]
        self.set_exception_handler(self._unhandled)

    @staticmethod
    def _task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], context: Context | None = None) -> Any:
        task = asyncio.Task(work, loop=loop, context=context)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(process.tasks.pop)
            if process.dead:
                task.cancel()
        return task

    def _unhandled(self, loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
        if not isinstance(told.get("exception"), Killed):
            self._world.violate("errors", f"{told['message']}: {told.get('exception')!r}")

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """See `VirtualLoop`; of a killed process the effect does not happen, of a stopped one it waits."""
        process = PROCESS.get()
        if process is None:
            return super().run_in_executor(executor, func, *args)
        if process.dead:
            raise Killed
        world, future = self._world, self.create_future()
        wrapped = getattr(func, "args", (None,))[0]  # `asyncio.to_thread` passes partial(context.run, the function)
        before_s, after_s = world.thread_s(process, getattr(wrapped, "__name__", ""))

        def call() -> None:
            fate = world.fate(process, "crash_at_disk")
            if fate and process.dice("crash_at_disk").random() < 0.5:
                world.kill(process)
                return
            result, error = None, None
            try:
                result = func(*args)
            except Killed:
                return
            except Exception as raised:
                error = raised
            if fate:
                world.kill(process)
                return
            self.call_later(after_s, process.when_running, lambda: settle(future, result, error))

        self.call_later(before_s, process.when_running, call)
        return future


class World:
    """Everything that the processes of one run share, and the record of what they did.

    `note` writes a line into the trace and its hash, `count` counts a situation that was reached, `violate` records a
    broken promise, which ends the run.
    """

    def __init__(self, scenario: Scenario, keep_trace: bool = False) -> None:
        self.scenario = scenario
        self.dice = Dice(scenario.seed)
        self.loop = _Loop(self)
        self.hub = MemoryHub(scenario.dedupe_window_s, self._stored)
        self.context = copy_context()
        self.on_stored: Callable[[Entry], None] = lambda entry: None
        self.on_given: Callable[[Process, Entry], None] = lambda process, entry: None
        self.on_acknowledged: Callable[[Entry], None] = lambda entry: None
        self.on_killed: Callable[[Process], None] = lambda process: None
        self.on_stopped: Callable[[Process], None] = lambda process: None
        self.situations: Counter[str] = Counter()
        self.struck: list[str] = []
        self.violations: list[Violation] = []
        self.failed = asyncio.Event()
        self.server_down_until_s = 0.0
        self.trace: deque[str] = deque(maxlen=None if keep_trace else TRACE_MAX)
        self._hash = hashlib.blake2b(digest_size=16)
        self._only = frozenset(scenario.only) if scenario.only is not None else None
        self._drawn: Counter[str] = Counter()
        self._rates = {kind: rate for kind, rate in scenario.faults.items() if kind in AT_CALL}

    # ---- the record

    def note(self, what: str, process: Process | None = None) -> None:
        """Something happened outside of a process."""
        process = process or PROCESS.get()
        line = f"{self.loop.time():10.4f} {process.label if process else '-':<14} {what}"
        self._hash.update(line.encode())
        self.trace.append(line)

    def count(self, situation: str) -> None:
        """A situation was reached."""
        self.situations[situation] += 1

    def violate(self, invariant: str, what: str) -> None:
        """A promise was broken."""
        self.violations.append(Violation(invariant, what, self.loop.time()))
        self.note(f"VIOLATED {invariant}: {what}")
        self.failed.set()

    @property
    def trace_hash(self) -> str:
        """Of all lines noted."""
        return self._hash.hexdigest()

    def _stored(self, entry: Entry) -> None:
        self.note(f"stored {entry.stream.name} {entry.seq} {entry.id or entry.key}")
        self.on_stored(entry)

    # ---- faults

    @property
    def quiet(self) -> bool:
        """Whether faults have ended."""
        return self.loop.time() >= self.scenario.quiet_s

    def fate(self, process: Process, *kinds: str) -> str:
        """Which of these faults strikes a process at this point; mostly none, ''. At most one does."""
        rates = self._rates
        if not any(kind in rates for kind in kinds) or self.quiet:
            return ""
        left = process.dice(kinds[0]).random()
        for kind in kinds:
            left -= rates.get(kind, 0.0)
            if left < 0:
                return kind if self.strikes(f"{kind}@{process.label}") else ""
        return ""

    def strikes(self, kind: str) -> bool:
        """Whether the next fault of this kind may strike: each has a name, so that a shrunk run can leave it out."""
        self._drawn[kind] += 1
        name = f"{kind}:{self._drawn[kind]}"
        if self._only is not None and name not in self._only:
            return False
        self.struck.append(name)
        self.note(f"FAULT {name}")
        return True

    def kill(self, process: Process) -> None:
        """kill -9."""
        if process.dead:
            return
        self.note("killed", process)
        process.dead = True
        process.held.clear()
        for task in list(process.tasks):
            task.cancel()
        self.on_killed(process)

    def stop_a_while(self, process: Process) -> None:
        """SIGSTOP, and SIGCONT some time later, at the latest when all becomes quiet. Maybe a successor is started."""
        if process.stopped:
            return
        process.stopped = True
        self.note("stopped by SIGSTOP", process)
        left_s = self.scenario.quiet_s - self.loop.time()
        dice = process.dice("stopped")
        self.later(min(dice.expovariate(1 / STOPPED_S), left_s), self._go_on, process)
        if dice.random() < 0.5:
            self.later(dice.expovariate(1.0), self.on_stopped, process)

    def _go_on(self, process: Process) -> None:
        if not process.dead:
            self.note("goes on", process)
            process.go_on()

    def later(self, delay_s: float, call: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call in a while, from no process."""
        return self.loop.call_later(delay_s, call, *args, context=self.context)

    # ---- the network and the disk

    def reaches(self, process: Process) -> bool:
        """Whether this process is connected to the log."""
        return self.loop.time() >= max(process.cut_until_s, self.server_down_until_s)

    def way_s(self, process: Process) -> float:
        """How long a message of or to a process is on its way."""
        return process.dice("network").expovariate(1.0 / self.scenario.network_s)

    def thread_s(self, process: Process, name: str) -> tuple[float, float]:
        """How long a call in a thread takes before and after its effect; a training step takes longer."""
        dice, scenario = process.dice("disk"), self.scenario
        mean_s = scenario.train_s if name == "step" else scenario.disk_s
        if self.fate(process, "slow_disk"):
            mean_s *= 50
        return dice.expovariate(2.0 / mean_s), dice.expovariate(2.0 / mean_s)
