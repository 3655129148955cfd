"""Starting, watching, killing and auditing real runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bus.jetstream import JetStreamBus
from bus.table import Stream
from ops.audit import AuditReport, audit_run
from ops.launch import locate
from ops.log_source import server_of
from schemas import Message

ROOT = Path(__file__).parents[2]
RECIPE = Path(__file__).parent / "recipe" / "recipe.yaml"
LOOK_S = 0.02
STEP_WAIT_S = 90.0
END_WAIT_S = 120.0
BRAKED = """
import pathlib, time

def reward(response, task, finish):
    if not pathlib.Path(__file__).with_name("fast").exists():
        time.sleep(0.3)
    words = response.split()
    return len(set(words)) / (len(words) + 1)
"""


def make_initial(folder: Path) -> Path:
    """Make version 0 of the recipe as a run would."""
    program = (
        "import sys, pathlib\n"
        "from ops.prepare import prepare\n"
        "from ops.recipe import load_recipe\n"
        "prepare(load_recipe(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(RECIPE), str(folder)], cwd=ROOT, check=True, env=_environment())
    return folder / "initial"


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


class Launched:
    """A `rollstream` command in a process group of its own, as a terminal would start it."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.folder = folder
        self.started_s = time.time()
        self._output = folder.parent / f"output-{time.time_ns()}.txt"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli", *arguments],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(),
            )

    @property
    def output(self) -> str:
        """All that it has printed so far, errors included."""
        return self._output.read_text()

    def pid(self, name: str) -> int:
        """The process of an actor, or of `nats-server`."""
        if name == "nats-server":
            return int((self.folder / "nats" / "server.pid").read_text())
        return int(json.loads((self.folder / "processes.json").read_text())[name])

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to an actor; returns its pid."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def kill_launcher(self) -> None:
        """kill -9 of the command itself, with whom all its processes end."""
        self.process.kill()
        self.process.wait()

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """What an actor has logged, over all starts."""
        path = self.folder / "logs" / f"{name}.jsonl"
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")[:-1]  # the last may be half written
        return [line for line in map(json.loads, lines) if line["event"] == event]

    @property
    def steps_trained(self) -> int:
        """How many steps the trainer has done, over all starts."""
        return max((line["version"] for line in self.events("trainer", "step_trained")), default=0)

    def until(self, what: str, holds: Callable[[], bool], wait_s: float = STEP_WAIT_S) -> None:
        """Wait until something holds; fails if the process ends before, or if it says nothing for too long.

        A run tells of each step, so that a slow one is waited for and a hung one is not.
        """
        heard, deadline_s = self._said(), time.monotonic() + wait_s
        while not holds():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.output}"
            if (said := self._said()) != heard:
                heard, deadline_s = said, time.monotonic() + wait_s
            assert time.monotonic() < deadline_s, f"no {what}, and no word for {wait_s} s:\n{self.output}"
            time.sleep(LOOK_S)

    def _said(self) -> int:
        return self._output.stat().st_size

    def until_step(self, steps: int) -> None:
        """Wait until so many steps are done."""
        self.until(f"step {steps}", lambda: self.steps_trained >= steps)

    def until_replaced(self, name: str, killed: int) -> None:
        """Wait until a killed actor has been started again."""

        def replaced() -> bool:
            with contextlib.suppress(KeyError, FileNotFoundError):  # it is just being started again
                return self.pid(name) != killed
            return False

        self.until(f"another {name}", replaced)

    def ends(self, wait_s: float = END_WAIT_S) -> int:
        """Wait for its end; returns the exit status. Fails if it says nothing for so long."""
        heard, deadline_s = self._said(), time.monotonic() + wait_s
        while self.process.poll() is None:
            if (said := self._said()) != heard:
                heard, deadline_s = said, time.monotonic() + wait_s
            assert time.monotonic() < deadline_s, f"it did not end, and said nothing for {wait_s} s:\n{self.output}"
            time.sleep(LOOK_S)
        return self.process.wait()

    def destroy(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def audited(folder: Path) -> AuditReport:
    """The audit of a run, whether it goes on or not."""
    return asyncio.run(audit_run(folder))


def assert_sound(folder: Path, steps: int) -> AuditReport:
    """The run has ended with all its steps, and nothing is lost, nothing twice."""
    audit = audited(folder)
    totals = audit.report.totals
    assert audit.clean, audit.to_json()
    assert audit.report.ended
    assert (totals["steps"], totals["versions"], totals.get("open", 0)) == (steps, steps + 1, 0)
    return audit


def read_all(folder: Path, *streams: Stream) -> list[list[Message]]:
    """All messages of some streams of a run, whether it goes on or not."""

    async def read() -> list[list[Message]]:
        where = locate(folder, None, None)
        async with server_of(folder, where.url) as url:
            bus = JetStreamBus(where.run, url)
            await bus.connect()
            try:
                return [await _all_of(bus, stream) for stream in streams]
            finally:
                await bus.close()

    return asyncio.run(read())


async def _all_of(bus: JetStreamBus, stream: Stream) -> list[Message]:
    info = await bus.info(stream)
    messages: list[Message] = []
    if info.messages:
        async with contextlib.aclosing(bus.read(stream)) as entries:  # type: ignore[type-var]
            async for entry in entries:
                messages.append(entry.message())
                if entry.seq >= info.last_seq:
                    break
    return messages


def run_apart(namespace: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run a stage in namespaces of its own; returns what its last line tells, which is JSON."""
    stage = subprocess.run(
        [*namespace, *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    print(stage.stdout)  # pytest shows it if the test fails
    assert stage.returncode == 0
    told: dict[str, Any] = json.loads(stage.stdout.splitlines()[-1])
    return told


class Brake:
    """A reward that makes each step take seconds, so that others can join, until `release`."""

    def __init__(self, folder: Path) -> None:
        self._release = folder / "fast"
        function = folder / "brake.py"
        function.write_text(BRAKED)
        self.override = f"reward.function={function}:reward"

    def release(self) -> None:
        """Let the run go on at its speed."""
        self._release.touch()
