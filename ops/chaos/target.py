"""A run under fire: started as a user starts it, its processes found by kind, resumed when its launcher dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ops.bench import command as run_command
from ops.bench import say
from ops.chaos.faults import Fault, Kind
from ops.host import initial_model
from ops.logging import configure
from ops.nats_cluster import NatsCluster
from ops.recipe import load_recipe
from schemas import UserError

TAIL_LINES = 15
REPLICAS = 3


async def warmed(
    kind: str, recipe: Path, overrides: Sequence[str], changes: Sequence[str], folder: Path | None
) -> Path:
    """The folder of a hunt or a soak, logged to and with the model that its runs start from in `warm`.

    `folder`, or a temporary one. `changes` are of the runs, not of the model. Raises `UserError`, before anything is
    begun, if the recipe holds a mistake or the folder exists.
    """
    load_recipe(recipe, (*changes, *overrides))
    if folder is not None and folder.exists():
        raise UserError(f"{folder} exists.", "Give another --dir.")
    place = (folder or Path(tempfile.mkdtemp(prefix=f"rollstream-{kind}-"))).resolve()
    place.mkdir(parents=True, exist_ok=True)
    configure(place / f"{kind}.jsonl", actor=kind, console=False)
    say("making the model that is started from")
    made = ("cli", "sft", str(recipe), *overrides, "--dir", str(place / "warm"))
    await run_command(made, place / "warm.txt")
    return place


class Target:
    """One run in `folder`, from the model `initial`, on its private server or on those of a cluster. `start` it."""

    def __init__(
        self, recipe: Path, overrides: Sequence[str], folder: Path, initial: Path, servers: NatsCluster | None = None
    ) -> None:
        self.folder = folder
        self._servers = servers
        where = [f"bus.replicas={REPLICAS}", "--nats", servers.url] if servers is not None else []
        run = ["run", str(recipe), *overrides, *where, "--dir", str(folder), "--plain"]
        self._command = [sys.executable, "-m", "cli", *run]
        self._process: asyncio.subprocess.Process | None = None
        self._stopped: dict[asyncio.Task[None], int] = {}
        shutil.copytree(initial, initial_model(folder))

    @property
    def output(self) -> Path:
        """What the launcher printed, over all its starts."""
        return self.folder.with_suffix(".txt")

    @property
    def status(self) -> int | None:
        """The launcher's exit status; None while it runs."""
        return self._process.returncode if self._process is not None else None

    def tail(self) -> str:
        """The end of what it printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    async def start(self) -> None:
        """Start the run, or resume it."""
        resume = ["--resume"] if (self.folder / "recipe.yaml").exists() else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.output.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, *resume, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def victims(self, kind: Kind) -> dict[str, int]:
        """The processes of a kind that live now: name to pid. A name stays when its process is started again."""
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            return self._victims(kind)
        return {}  # it is just ending, or being started again

    def _victims(self, kind: Kind) -> dict[str, int]:
        assert self._process is not None
        if kind == "launcher":
            return {"launcher": self._process.pid} if self.status is None else {}
        if kind == "nats" and self._servers is not None:
            return self._servers.pids
        launcher = psutil.Process(self._process.pid)
        if kind in ("nats", "fork-server"):
            sign = "nats-server" if kind == "nats" else "multiprocessing.forkserver"
            found = [child.pid for child in launcher.children() if any(sign in part for part in child.cmdline()[:4])]
            return {str(kind): pid for pid in found}
        actors: dict[str, int] = json.loads((self.folder / "processes.json").read_text())
        if kind == "reward-child":
            return {name: child for name, pid in actors.items() if name.startswith("reward") for child in _inner(pid)}
        ours = {child.pid for child in launcher.children(recursive=True)}
        return {name: pid for name, pid in actors.items() if pid in ours and name.startswith(kind)}

    async def strike(self, kind: Kind, victim: str, pid: int, stop_s: float) -> Fault | None:
        """Kill a process, or stop it for `stop_s`; None if it was gone. A killed launcher is started again."""
        now_s = time.time()
        fault = Fault(kind, victim, pid, now_s, now_s + stop_s, stop=stop_s > 0)
        try:
            os.kill(pid, signal.SIGSTOP if stop_s else signal.SIGKILL)
        except ProcessLookupError:
            return None
        if stop_s:
            task = asyncio.create_task(self._continue(fault, stop_s))
            self._stopped[task] = pid
            task.add_done_callback(lambda done: self._stopped.pop(done, None))
        elif kind == "launcher":
            assert self._process is not None
            await self._process.wait()
            await self.start()
        return fault

    async def _continue(self, fault: Fault, stop_s: float) -> None:
        try:
            await asyncio.sleep(stop_s)
        finally:
            fault.ended_s = time.time()
            with contextlib.suppress(ProcessLookupError):
                os.kill(fault.pid, signal.SIGCONT)

    async def end(self, timeout_s: float) -> int | None:
        """Wait for the launcher's end; its exit status, None if it did not end."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._process.wait(), timeout_s)
        return None

    async def interrupt(self) -> int:
        """Ctrl-C: drain; returns the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return await self._process.wait()

    async def destroy(self) -> None:
        """Leave nobody behind, and nobody stopped."""
        for task in list(self._stopped):
            task.cancel()
        await asyncio.gather(*self._stopped, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def _inner(worker: int) -> list[int]:
    """The processes that run the user's reward function for a reward worker: the children of its guards."""
    guards = [child for child in psutil.Process(worker).children() if "actors.reward.child" in child.cmdline()]
    return [child.pid for guard in guards for child in guard.children()]
