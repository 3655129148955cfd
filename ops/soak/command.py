"""The soak: start a run, move its workers about, measure, let it end in order, and judge."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil

from bus.jetstream import JetStreamBus
from bus.port import Bus
from ops.audit import AuditReport, audit_log
from ops.bench import command as run_command
from ops.bench import describe_machine, publish, say
from ops.chaos.target import Target, warmed
from ops.host import initial_model
from ops.launch import locate
from ops.log_source import open_log
from ops.scale import scale
from ops.soak.memory import Growth, Sample, growths
from ops.soak.moves import Move, Moves
from ops.soak.report import AGE_MAX, DISCARDED_MAX, report
from ops.soak.tokens import Account, Meter, account
from schemas import UserError

WORKERS = 2
CHANGES = ("processes=separate", f"rollout.workers={WORKERS}", "evaluation.count=0", "steps=1000000")
LOOK_S = 0.1
SAMPLE_EVERY_S = 2.0
BEGIN_S = 120.0
LEAVE_S = 40.0
MORE_STEPS = 5  # for which the run is resumed, so that it ends and every sample has its end


@dataclasses.dataclass(frozen=True, slots=True)
class Soak:
    """What `rollstream bench soak` was asked for."""

    recipe: Path
    overrides: tuple[str, ...]
    minutes: float
    seed: int
    out: Path | None = None
    folder: Path | None = None

    @property
    def command(self) -> str:
        """As it is typed."""
        options = (f"--minutes {self.minutes:g}", f"--seed {self.seed}")
        return " ".join(["rollstream bench soak", str(self.recipe), *self.overrides, *options])


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What the soak came to."""

    seconds: float
    moves: tuple[Move, ...]
    account: Account
    growths: tuple[Growth, ...]
    audit: AuditReport

    @property
    def sound(self) -> bool:
        """Whether all is as it should be."""
        return (
            self.audit.clean
            and self.audit.report.ended
            and not self.audit.report.totals.get("open", 0)
            and self.account.age <= AGE_MAX
            and self.account.discarded <= DISCARDED_MAX
            and not any(growth.grows for growth in self.growths)
        )


async def soak(asked: Soak) -> int:
    """Soak, print the table and write it; 0 if all is as it should be, 1 if not."""
    machine = describe_machine()
    place = await warmed("soak", asked.recipe, asked.overrides, CHANGES, asked.folder)
    outcome = await _soaked(asked, place)
    publish(report(asked, outcome, machine), asked.out)
    if outcome.sound and asked.folder is None:
        shutil.rmtree(place)
    else:
        say(f"the run is kept in {place}")
    return 0 if outcome.sound else 1


async def _soaked(asked: Soak, place: Path) -> Outcome:
    folder = place / "run"
    target = Target(asked.recipe, (*CHANGES, *asked.overrides), folder, initial_model(place / "warm"))
    try:
        await target.start()
        await _begun(target)
        where = locate(folder, None, None)
        bus = JetStreamBus(where.run, where.url, "soak")
        await bus.connect()
        try:
            watch = _Watch(target, bus)
            seconds, moves = await _moved(asked, watch)
            (place / "memory.json").write_text(json.dumps([dataclasses.astuple(sample) for sample in watch.samples]))
            found = await account(bus, watch.meter.tokens)
            await scale(bus, {"rollout": WORKERS})
        finally:
            await bus.close()
        await target.interrupt()
    finally:
        await target.destroy()
    say(f"{found.steps} steps; now the run ends in order")
    changes = (*CHANGES, *asked.overrides, f"steps={found.steps + MORE_STEPS}")
    run = ("cli", "run", str(asked.recipe), *changes, "--dir", str(folder), "--plain", "--resume")
    await run_command(run, place / "resumed.txt")
    async with open_log(str(folder)) as log:
        audit = await audit_log(log)
    return Outcome(seconds, tuple(moves), found, tuple(growths(watch.samples, seconds)), audit)


async def _begun(target: Target) -> None:
    until_s = time.monotonic() + BEGIN_S
    steps = target.folder / "logs" / "trainer.jsonl"
    while not (steps.exists() and b'"step_trained"' in steps.read_bytes()):
        if target.status is not None or time.monotonic() > until_s:
            raise UserError("The run did not begin.", f"It said:\n{target.tail()}")
        await asyncio.sleep(LOOK_S)


class _Watch:
    """Hears the beats and samples the memory of a run's processes."""

    def __init__(self, target: Target, bus: Bus) -> None:
        self.target = target
        self.bus = bus
        self.meter = Meter()
        self.samples: list[Sample] = []
        self._began_s = time.monotonic()

    async def beats(self) -> None:
        async for beat in self.bus.beats():
            self.meter.heard(beat, time.time())

    async def memory(self) -> None:
        while True:
            for kind in ("launcher", "nats", "fork-server", "controller", "reward", "trainer", "rollout"):
                for name, pid in self.target.victims(kind).items():
                    with contextlib.suppress(psutil.Error):
                        rss = psutil.Process(pid).memory_info().rss
                        self.samples.append(Sample(time.monotonic() - self._began_s, name, pid, rss))
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def move(self, move: Move) -> None:
        """Kill whom it says, ask the rest to leave or to join."""
        alive = self.target.victims("rollout")
        for number in move.killed:
            pid = alive.get(f"rollout-{number}")
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.meter.killed(pid, time.time())
        (told,) = await scale(self.bus, {"rollout": move.workers})
        say(f"  {told}" + (f", {len(move.killed)} killed" if move.killed else ""))


async def _moved(asked: Soak, watch: _Watch) -> tuple[float, list[Move]]:
    """Move workers about for the time that was asked for; returns the seconds and the moves."""
    began_s = time.monotonic()
    side = [asyncio.create_task(watch.beats(), name="hears beats"), asyncio.create_task(watch.memory(), name="samples")]
    drawn, made = Moves(asked.seed, WORKERS), []
    try:
        while True:
            move = drawn.draw()
            if time.monotonic() - began_s + move.gap_s > 60 * asked.minutes:
                break
            await asyncio.sleep(move.gap_s)
            if watch.target.status is not None:
                raise UserError(f"The run ended with status {watch.target.status}.", f"It said:\n{watch.target.tail()}")
            for task in side:
                if task.done():
                    task.result()
            await watch.move(move)
            made.append(move)
        await asyncio.sleep(max(0.0, began_s + 60 * asked.minutes - time.monotonic()))
        seconds = time.monotonic() - began_s
        await scale(watch.bus, {"rollout": 0})  # beats are heard until the last worker has said goodbye
        await _gone(watch.target)
        return seconds, made
    finally:
        for task in side:
            task.cancel()
        await asyncio.gather(*side, return_exceptions=True)


async def _gone(target: Target) -> None:
    until_s = time.monotonic() + LEAVE_S
    while target.victims("rollout") and time.monotonic() < until_s:
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(1.0)  # for their last beats
