"""Starts processes and starts them again when they die.

Children come from a fork server that has imported torch and transformers once: a worker starts in a tenth of a second
instead of four, shares that memory, and is back as fast after a kill. Each child ends with the launcher: no orphans.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import structlog

from actors.episode.running import Fallen, left_by
from bus.table import BEAT_EVERY_S
from ops.host import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR, ProcessSpec
from ops.host import main as host_main
from schemas import UserError

log = structlog.get_logger()

BACKOFF_S = 0.2
BACKOFF_MAX_S = 10.0
STEADY_S = 20.0  # a process that lived so long and dies is started at once
FAILURES_MAX = 8  # crashes in a row, each before STEADY_S, or kills in a row, each before the first beat
KILLED_BACKOFF_S = 0.2
FORK_SERVER_LOST = 255  # what multiprocessing tells of the children of a fork server that has died
FORK_FAILURES = (EOFError, OSError)  # of a start, when the fork server dies in the midst of it
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)  # of compiled code
WATCH_S = 0.05
DRAIN_S = 30.0
STARTING_S = 600.0  # silence that a process is allowed before its first beat: it may load a large model
DEAF_S = 3.0  # our own beat was not heard for so long: then nobody else's silence says anything
PR_SET_PDEATHSIG = 1
ORDERLY = 80  # added to the status of a process that our own code ended: a user's function may end it with any other

_PRELOAD = ["ops.preload"]


TEMPORARY_PATH_MAX = 107 - len("/pymp-12345678/listener-12345678")  # the kernel's bound, and what multiprocessing adds


def fork_server(heavy: bool = True) -> multiprocessing.context.BaseContext:
    """The context whose children are forked from a server with torch already imported.

    Raises `UserError` if the folder for temporary files has too long a path for the server's socket.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > TEMPORARY_PATH_MAX:
        raise UserError(
            f"The path of the folder for temporary files has more than {TEMPORARY_PATH_MAX} bytes, too many for a "
            f"socket in it: {folder}.",
            "Name a shorter one, such as TMPDIR=/tmp.",
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD if heavy else ["ops.host"])
    return context


def die_with_parent() -> None:
    """From now on a parent that is killed takes this process with it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(target: Callable[..., None], args: tuple[object, ...], output: Path) -> None:
    """What a forked child does first: die with its launcher, leave the terminal alone."""
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the launcher's to heed; what we start has it as usual
    die_with_parent()  # the fork server
    if b"forkserver" not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():  # it died before that
        os.kill(os.getpid(), signal.SIGKILL)
    # The fork server outlives a killed launcher as long as it has children, so they watch the launcher themselves.
    threading.Thread(target=_die_with_launcher, name="watches the launcher", daemon=True).start()
    output.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    target(*args)


def _orderly(spec: ProcessSpec) -> None:
    """The life of a supervised process. It ends with its `EXIT_` code above `ORDERLY`."""
    try:
        host_main(spec)
    except SystemExit as end:
        sys.exit(ORDERLY + end.code if isinstance(end.code, int) else ORDERLY + EXIT_FAILED)
    sys.exit(ORDERLY + EXIT_DONE)


def _die_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    process: BaseProcess | None = None
    started_s: float = 0.0
    crashes: int = 0  # in a row, each before `STEADY_S`
    stillborn: int = 0  # kills in a row, each before its first beat
    restarts: int = 0
    restart_at_s: float | None = None  # it died, and is started again then
    silent_s: float = 0.0  # since its last beat, as far as beats could be heard
    beaten: bool = False
    hung: bool = False
    done: bool = False
    leave_until_s: float | None = None  # it was asked to leave, and is killed then


class Supervisor:
    """The processes of one machine. `note(text)` tells the person what happened to them; `heavy` if some need torch.

    A process that has beaten and then is silent for `hung_after_s` is killed and started again (0: never), if it is
    told what is `heard` and asked to `watch_for_hung` once a second.
    """

    def __init__(
        self, note: Callable[[str], None] = lambda _: None, heavy: bool = True, hung_after_s: float = 0.0
    ) -> None:
        self.note = note
        self.hung_after_s = hung_after_s
        self._host = socket.gethostname()
        self._heard_self_s = -math.inf
        self._looked_s = time.monotonic()
        self._context = fork_server(heavy)
        self._children: dict[str, _Child] = {}
        self.draining = False

    @property
    def pids(self) -> dict[str, int]:
        """Process name to pid, of those alive."""
        return {
            name: child.process.pid
            for name, child in self._children.items()
            if child.process is not None and child.process.pid is not None and child.process.exitcode is None
        }

    @property
    def restarts(self) -> dict[str, int]:
        """Process name to how often it was started again."""
        return {name: child.restarts for name, child in self._children.items() if child.restarts}

    @property
    def names(self) -> set[str]:
        """The processes that it has, those among them that are done, leaving, or just being started again."""
        return set(self._children)

    @property
    def leaving(self) -> set[str]:
        """Those that were asked to leave and have not ended yet."""
        return {name for name, child in self._children.items() if child.leave_until_s is not None}

    def leave(self, name: str) -> None:
        """Ask a process to hand its work over and to end: SIGTERM, after `DRAIN_S` SIGKILL. Then it is forgotten."""
        child = self._children[name]
        if child.leave_until_s is None:
            log.info("process_asked_to_leave", process=name)
            child.leave_until_s = time.monotonic() + DRAIN_S
            if child.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.terminate()

    async def start(self, spec: ProcessSpec) -> None:
        """Start a process."""
        self._children[spec.name] = child = _Child(spec)
        await self._spawn(child)

    async def _spawn(self, child: _Child) -> None:
        """Start its process, or have it tried again soon if the fork server is just dying."""
        spec = child.spec
        output = spec.folder / "logs" / f"{spec.name}.out"
        try:
            child.process = await forked(self._context, _orderly, (spec,), spec.name, output)
        except FORK_FAILURES as error:
            log.warning("process_not_started", process=spec.name, error=repr(error))
            child.stillborn += 1
            if child.stillborn >= FAILURES_MAX:
                raise UserError(
                    f"{spec.name} cannot be started: {error!r}.", "Is there enough memory and disk for it?"
                ) from error
            child.restart_at_s = time.monotonic() + KILLED_BACKOFF_S * child.stillborn
            return
        log.info("process_started", process=spec.name, pid=child.process.pid)
        child.started_s = time.monotonic()
        child.restart_at_s = None
        child.silent_s, child.beaten, child.hung = 0.0, False, False
        if child.leave_until_s is not None:  # it was asked while it was being started again
            child.process.terminate()

    def heard(self, beat: Mapping[str, Any]) -> None:
        """Take a beat that came over the bus, of whatever process, this one included."""
        process = beat.get("process")
        if process == f"{self._host}:{os.getpid()}":
            self._heard_self_s = time.monotonic()
        for name, pid in self.pids.items():
            if process == f"{self._host}:{pid}":
                child = self._children[name]
                child.silent_s, child.beaten, child.stillborn = 0.0, True, 0

    def watch_for_hung(self) -> None:
        """Kill processes that are silent for too long. Silence counts only while our own beats come back to us.

        A second of silence is counted for each call, at most: if we were stopped ourselves, that says nothing.
        """
        now_s = time.monotonic()
        passed_s, self._looked_s = min(BEAT_EVERY_S, now_s - self._looked_s), now_s
        deaf = now_s - self._heard_self_s > DEAF_S
        for child in self._alive():
            child.silent_s = 0.0 if deaf else child.silent_s + passed_s
            limit_s = self.hung_after_s if child.beaten else STARTING_S
            if self.hung_after_s > 0 and child.silent_s > limit_s:
                assert child.process is not None
                log.warning("process_hung", process=child.spec.name, pid=child.process.pid, silent_s=child.silent_s)
                self.note(f"{child.spec.name} gave no sign of life for {child.silent_s:.0f} s and is killed")
                child.silent_s, child.hung = 0.0, True
                child.process.kill()

    def _alive(self) -> list[_Child]:
        return [self._children[name] for name in self.pids]

    async def watch(self) -> None:
        """Return when all processes are done, or have ended while draining.

        Raises:
            UserError: a process that is needed found something that only the user can mend, or dies again and again.
        """
        while not all(child.done for child in self._children.values()):
            await asyncio.sleep(WATCH_S)
            for child in list(self._children.values()):
                if child.leave_until_s is not None and not self.draining:
                    self._left(child, child.leave_until_s)
                elif child.done:
                    continue
                elif child.restart_at_s is not None and not self.draining:
                    if time.monotonic() >= child.restart_at_s:
                        child.restarts += 1
                        await self._spawn(child)
                elif child.process is None:
                    child.done = self.draining
                elif child.process.exitcode is not None:
                    self._ended(child, child.process.exitcode)

    def _left(self, child: _Child, until_s: float) -> None:
        """Forget a leaving process once it has ended, however it did."""
        process = child.process
        if process is None or process.exitcode is not None:
            log.info("process_left", process=child.spec.name, status=process.exitcode if process else None)
            del self._children[child.spec.name]
        elif time.monotonic() > until_s:
            self.note(f"{child.spec.name} did not leave within {DRAIN_S:.0f} s and is killed")
            process.kill()

    def _ended(self, child: _Child, status: int) -> None:
        name = child.spec.name
        if status == ORDERLY + EXIT_DONE or self.draining:
            child.done = True
            return
        if status == ORDERLY + EXIT_USER_ERROR:
            self._fail(child, child.spec.left_error())
            return
        lived_s = time.monotonic() - child.started_s
        how, wait_s = self._judge(child, status, lived_s)
        log.warning("process_died", process=name, how=how, lived_s=round(lived_s, 1), crashes=child.crashes)
        if max(child.crashes, child.stillborn) >= FAILURES_MAX:
            words = last_words_in(child.spec.folder / "logs" / f"{name}.jsonl")
            killed = "It was killed from outside before it began to work: is there enough memory?"
            remedy = words if child.crashes >= FAILURES_MAX else killed
            self._fail(child, UserError(f"{name} {how}, {FAILURES_MAX} times in a row.", remedy))
            return
        if child.spec.optional and self._the_needed_are_done():
            self._fail(child, UserError(f"{name} {how} when all others were done.", "It is not started again."))
            return
        child.spec = dataclasses.replace(child.spec, died="" if status == ORDERLY + EXIT_STOPPED else how)
        fallen = self._fallen(child, status)
        at = f" while sample {fallen.culprit} ran" if fallen is not None and fallen.culprit else ""
        self.note(f"{name} {how}{at}; it is started again")
        child.restart_at_s = time.monotonic() + wait_s

    def _fail(self, child: _Child, error: UserError) -> None:
        """A process will not be started again. Raises the error, unless the others can do without it."""
        child.done = True
        if not child.spec.optional or all(other.spec.optional for other in self._children.values()):
            raise error
        log.warning("process_given_up", process=child.spec.name, reason=error.message)
        self.note(f"{error.message} {error.remedy} The run goes on without it")

    def _the_needed_are_done(self) -> bool:
        """Whether all that the run needs is done, if there is any: from then on who dies holds up the end."""
        needed = [child.done for child in self._children.values() if not child.spec.optional]
        return bool(needed) and all(needed)

    def _fallen(self, child: _Child, status: int) -> Fallen | None:
        """What an episode worker has left behind that did not end in order."""
        return left_by(child.spec.record_file) if child.beaten and not 0 <= status - ORDERLY <= EXIT_STOPPED else None

    def _judge(self, child: _Child, status: int, lived_s: float) -> tuple[str, float]:
        """How it ended, in words, and how long to wait before it is started again. Counts what is to end the run.

        A crash is its own doing: it will most likely happen again, so that the run ends after a few in a row. A kill
        comes from outside, from the kernel when memory is short or from a person: it says nothing about the next time,
        and counts only if the process never came as far as a first beat.
        """
        if status == ORDERLY + EXIT_STOPPED:  # by SIGTERM, and not by us: without it the run might wait for ever
            child.crashes = 0
            return "was stopped", 0.0
        if status == FORK_SERVER_LOST or (status < 0 and -status not in CRASHES):
            child.stillborn = 0 if child.beaten else child.stillborn + 1
            how = "lost the fork server" if status > 0 else f"was killed by {signal.Signals(-status).name}"
            return ("hung and was killed" if child.hung else how), KILLED_BACKOFF_S * child.stillborn
        how = f"ended with status {status}" if status >= 0 else f"crashed with {signal.Signals(-status).name}"
        if status == ORDERLY + EXIT_FAILED:
            how = "ended by an error"
        elif (fallen := self._fallen(child, status)) is not None and fallen.running:
            # An episode of the user's did that. Which one, its next life finds out, and bounds how often: see `deaths`.
            child.crashes = 0
            return fallen.words or how, KILLED_BACKOFF_S
        child.crashes = child.crashes + 1 if lived_s < STEADY_S else 1
        wait_s = min(BACKOFF_MAX_S, BACKOFF_S * 2 ** (child.crashes - 2)) if child.crashes > 1 else 0.0
        return how, wait_s

    async def drain(self, grace_s: float = DRAIN_S) -> None:
        """End all processes: SIGTERM, so that they hand over and save; after `grace_s` SIGKILL."""
        self.draining = True
        alive = [child.process for child in self._alive() if child.process is not None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + grace_s
        while any(process.exitcode is None for process in alive) and time.monotonic() < deadline:
            await asyncio.sleep(WATCH_S)
        self.kill()
        for child in self._children.values():
            child.done = True

    def kill(self) -> None:
        """End what still runs, at once."""
        for child in self._alive():
            assert child.process is not None
            log.warning("process_killed", process=child.spec.name)
            child.process.kill()


async def forked(
    context: Any, target: Callable[..., None], args: tuple[object, ...], name: str, output: Path
) -> BaseProcess:
    """Start a process. In a thread: a fork server that must first be started itself takes seconds.

    Raises one of `FORK_FAILURES` if the fork server dies meanwhile.
    """
    process: BaseProcess = context.Process(target=_child, args=(target, args, output), name=name)
    await asyncio.to_thread(process.start)
    return process


async def run_once(target: Callable[..., None], args: tuple[object, ...], spec: ProcessSpec, output: Path) -> None:
    """Run a function in a process of its own to its end; again if it loses the fork server, so it must allow that.

    Raises:
        UserError: it left one, or it died.
    """
    for _ in range(FAILURES_MAX):
        status = await _run_once(target, args, spec, output)
        if status == 0:
            return
        if status == EXIT_USER_ERROR:
            raise spec.left_error()
        if status != FORK_SERVER_LOST:
            break
        await asyncio.sleep(KILLED_BACKOFF_S)
    raise UserError(f"{spec.name} ended with status {status}.", last_words_in(output))


def last_words_in(output: Path) -> str:
    """Where to look for what a process said before it ended."""
    return f"Its last words are in {output}."


async def _run_once(target: Callable[..., None], args: tuple[object, ...], spec: ProcessSpec, output: Path) -> int:
    try:
        process = await forked(fork_server(), target, args, spec.name, output)
    except FORK_FAILURES:
        return FORK_SERVER_LOST
    try:
        while process.exitcode is None:
            await asyncio.sleep(WATCH_S)
        return process.exitcode
    finally:
        if process.exitcode is None:
            process.kill()
