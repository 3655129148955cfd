"""The hunt: run after run, fault after fault, until enough processes were killed; then the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ops.bench import describe_machine, publish, say
from ops.chaos.faults import KINDS, Dice, Fault, Kind
from ops.chaos.judge import Outcome, judge
from ops.chaos.report import report
from ops.chaos.target import Target, warmed
from ops.host import initial_model
from ops.nats_cluster import NatsCluster, cluster
from schemas import UserError

# Each kind of process is one of its own, and there are two of those that come in numbers.
CHANGES = (
    "processes=separate",
    "rollout.workers=2",
    "reward.workers=2",
    "reward.children=1",
    "evaluation.count=0",
    "steps=120",
)
LOOK_S = 0.05
TELL_EVERY = 10  # faults
PATIENCE_S = 60.0  # at most so long is waited for a step after a fault, before the next one
STALLED_S = 120.0  # a run that does nothing for so long, though nobody hits it, will not end


@dataclasses.dataclass(frozen=True, slots=True)
class Hunt:
    """What `rollstream chaos` was asked for."""

    recipe: Path
    overrides: tuple[str, ...]
    kills: int
    seed: int
    kinds: tuple[Kind, ...] = KINDS
    nodes: int = 1
    out: Path | None = None
    folder: Path | None = None

    @property
    def command(self) -> str:
        """As it is typed."""
        kinds = [] if self.kinds == KINDS else [f"--kind {kind}" for kind in self.kinds]
        nodes = [f"--nodes {self.nodes}"] if self.nodes > 1 else []
        options = [f"--kills {self.kills}", f"--seed {self.seed}", *kinds, *nodes]
        return " ".join(["rollstream chaos", str(self.recipe), *self.overrides, *options])


async def chaos(hunt: Hunt) -> int:
    """Hunt, print the table and write it; 0 if all runs ended with a clean log. Ctrl-C prints the table so far."""
    machine = describe_machine()
    place = await warmed("chaos", hunt.recipe, hunt.overrides, CHANGES, hunt.folder)
    outcomes: list[Outcome] = []
    interrupted = False
    hunting = asyncio.current_task()
    assert hunting is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, hunting.cancel)  # as Ctrl-C does
    try:
        async with cluster(place / "cluster", hunt.nodes) if hunt.nodes > 1 else contextlib.nullcontext() as servers:
            await _hunt(hunt, place, servers, outcomes)
    except asyncio.CancelledError:
        interrupted = True
    publish(report(outcomes, machine, hunt.command), hunt.out)
    sound = all(outcome.sound for outcome in outcomes) and not interrupted
    if sound and hunt.folder is None:
        shutil.rmtree(place)
    else:
        say(f"the runs are kept in {place}")
    return 0 if sound else 130 if interrupted else 1


async def _hunt(hunt: Hunt, place: Path, servers: NatsCluster | None, outcomes: list[Outcome]) -> None:
    dice = Dice(hunt.seed, hunt.kinds)
    kills = 0
    while kills < hunt.kills:
        name = f"run-{len(outcomes)}"
        initial = initial_model(place / "warm")
        target = Target(hunt.recipe, (*CHANGES, *hunt.overrides), place / name, initial, servers)
        faults: list[Fault] = []
        try:
            await target.start()
            await _harry(target, dice, faults, hunt.kills - kills)
            status = await _ending(target)
        finally:
            await target.destroy()
        outcome = await judge(target.folder, status, faults, time.time())
        outcomes.append(outcome)
        kills += sum(not fault.stop for fault in faults)
        _tell(name, outcome, target, kills, hunt.kills)
        if kills == 0 and status != 0:
            raise UserError(f"The run ended with status {status} before any fault.", f"It said:\n{target.tail()}")


async def _harry(target: Target, dice: Dice, faults: list[Fault], kills_max: int) -> None:
    """Inflict faults until the run ends, or enough are killed."""
    await _begun(target)
    strike = dice.draw()
    ready_s, seen = time.monotonic(), -1
    while target.status is None and sum(not fault.stop for fault in faults) < kills_max:
        await asyncio.sleep(LOOK_S)
        now_s = time.monotonic()
        if seen >= 0 and not strike.close and now_s < ready_s + PATIENCE_S:
            if now_s < ready_s:
                seen = _steps(target.folder)  # steps that were done while a process is held do not count
            if _steps(target.folder) <= seen:
                continue  # so that recovery can be seen, however slow the machine is
            ready_s, seen = now_s, -1
        if now_s < ready_s + strike.gap_s:
            continue
        victims = target.victims(strike.kind)
        if not victims:
            continue  # it is being started again: struck as soon as it lives
        victim = dice.pick(list(victims))
        fault = await target.strike(strike.kind, victim, victims[victim], strike.stop_s)
        if fault is not None:
            faults.append(fault)
            if len(faults) % TELL_EVERY == 0:
                say(f"  {len(faults)} faults in {target.folder.name}")
            strike = dice.draw()
            ready_s, seen = time.monotonic() + fault.ended_s - fault.at_s, _steps(target.folder)
    dice.put_back(strike)


async def _begun(target: Target) -> None:
    while target.status is None and not (target.folder / "processes.json").exists():
        await asyncio.sleep(LOOK_S)


async def _ending(target: Target) -> int | None:
    """The run's exit status once it is left alone; None if it stands still."""
    seen, since_s = -1, time.monotonic()
    while target.status is None and time.monotonic() - since_s < STALLED_S:
        await target.end(LOOK_S)
        if (steps := _steps(target.folder)) != seen:
            seen, since_s = steps, time.monotonic()
    return target.status


def _steps(folder: Path) -> int:
    """How many steps the trainer says that it has done, those before a restart included."""
    with contextlib.suppress(OSError):
        return (folder / "logs" / "trainer.jsonl").read_bytes().count(b'"step_trained"')
    return 0


def _tell(name: str, outcome: Outcome, target: Target, kills: int, wanted: int) -> None:
    worst = max((recovery.seconds for recovery in outcome.recoveries), default=0.0)
    text = (
        f"{name}: {len(outcome.recoveries)} faults, worst recovery {worst:.1f} s, "
        f"{outcome.lost} lost, {outcome.twice} twice; {kills} of {wanted} kills"
    )
    say(text)
    if not outcome.sound:
        say(f"  NOT SOUND: status {outcome.status}, audit {'clean' if outcome.audit.clean else 'broken'}")
        say("  " + target.tail().replace("\n", "\n  "))
        print(outcome.audit.to_json(), file=sys.stderr)


def kinds_of(names: Sequence[str]) -> tuple[Kind, ...]:
    """The kinds that these names are. Raises `UserError`."""
    for name in names:
        if name not in KINDS:
            raise UserError(f"There is no kind of process named {name}.", f"They are: {', '.join(KINDS)}.")
    return tuple(kind for kind in KINDS if not names or kind in names)
