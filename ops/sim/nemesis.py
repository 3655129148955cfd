"""The faults that strike at some time: whole processes, their connections, the server, the user."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bus.memory import MemoryBus
from bus.port import BusFull, BusUnavailable
from bus.table import ANSWERS, DROPPED, EVALUATIONS, LEASES, NOTES, PARTIALS, ROLLOUTS, SCORED, STREAMS, TURNS
from ops.audit import audit_log
from ops.log_source import RunLog
from ops.sim.network import SimBus
from ops.sim.scenario import TIMED
from ops.sim.world import RUN, Process, World
from schemas import Control, UserError

if TYPE_CHECKING:
    from ops.sim.run import _Launcher

AGAIN_S: Final = 0.1
FORGOTTEN_S: Final = 0.3  # acknowledgements that a killed server forgets
ANYBODY_WRITES: Final = (ROLLOUTS, SCORED, DROPPED, PARTIALS)  # the others' sequences mean something
OF_EPISODES: Final = (TURNS, ANSWERS)  # anybody writes them too
WRITTEN: Final = tuple(stream for stream in STREAMS if stream not in (EVALUATIONS, NOTES, *OF_EPISODES))


class Nemesis:
    """Strikes at the processes of a launcher until the scenario's quiet time."""

    def __init__(self, world: World, launcher: _Launcher) -> None:
        self._world = world
        self._launcher = launcher
        self._audits = 0
        self._user = asyncio.Lock()
        self._of_episodes = OF_EPISODES if world.scenario.episodes else ()
        self._strikes: dict[str, Callable[[random.Random, Process], None]] = {
            "kill": self._kill,
            "term": self._term,
            "stall": self._stall,
            "partition": self._partition,
            "restart": self._restart,
            "full": self._full,
            "clock": self._clock,
            "pause": self._pause,
            "drain": self._drain,
            "power": self._power,
            "lease": self._lease,
            "garbage": self._garbage,
            "audit": self._audit,
        }

    def works(self) -> list[Coroutine[Any, Any, None]]:
        """One for each kind that is in the scenario."""
        faults = self._world.scenario.faults
        return [self._strike_at_times(kind, faults[kind]) for kind in TIMED if kind in faults]

    async def _strike_at_times(self, kind: str, rate: float) -> None:
        dice = self._world.dice(f"fault/{kind}")
        while True:
            await asyncio.sleep(dice.expovariate(rate))
            if self._world.quiet:
                return
            target = dice.random()
            alive = self._launcher.alive
            if alive and self._world.strikes(kind):
                self._strikes[kind](dice, alive[int(target * len(alive))])

    def _while_s(self, dice: random.Random, mean_s: float) -> float:
        """How long a fault lasts; none outlasts the quiet time by much."""
        left_s = self._world.scenario.quiet_s - self._world.loop.time()
        return min(dice.expovariate(1 / mean_s), left_s)

    def _kill(self, dice: random.Random, process: Process) -> None:
        self._world.kill(process)

    def _term(self, dice: random.Random, process: Process) -> None:
        self._world.note("told to stop", process)
        process.stop.set()

    def _stall(self, dice: random.Random, process: Process) -> None:
        self._world.stop_a_while(process)

    def _partition(self, dice: random.Random, process: Process) -> None:
        process.cut_until_s = self._world.loop.time() + self._while_s(dice, dice.choice((0.5, 5.0, 30.0)))
        self._world.note(f"is cut off until {process.cut_until_s:.3f}", process)

    def _restart(self, dice: random.Random, process: Process) -> None:
        world = self._world
        now_s = world.loop.time()
        world.server_down_until_s = now_s + dice.uniform(0.02, 2.0)
        for queue in world.hub.runs[RUN].queues.values():
            for _ in range(queue.forget_since(now_s - FORGOTTEN_S)):
                world.count("an acknowledgement was forgotten")

    def _full(self, dice: random.Random, process: Process) -> None:
        stream = dice.choice(WRITTEN + self._of_episodes).name
        self._world.hub.full.add(stream)
        self._world.note(f"{stream} is full")
        self._world.later(self._while_s(dice, 2.0), self._make_room, stream)

    def _make_room(self, stream: str) -> None:
        self._world.note(f"{stream} has room again")
        self._world.hub.full.discard(stream)

    def _clock(self, dice: random.Random, process: Process) -> None:
        process.clock.skew_s += dice.gauss(0.0, 1000.0)

    def _pause(self, dice: random.Random, process: Process) -> None:
        nonce = f"{self._world.loop.time():.6f}"
        self._publish(Control(action="pause", nonce=nonce))
        self._world.later(self._while_s(dice, 2.0), self._publish, Control(action="resume", nonce=nonce))

    def _publish(self, control: Control) -> None:
        self._world.loop.create_task(self.published(control), context=self._world.context)

    async def published(self, control: Control) -> None:
        """What the user does is repeated until it is stored, one thing after another."""
        bus = MemoryBus(RUN, self._world.hub)
        async with self._user:
            while True:
                try:
                    await bus.publish(control)
                except BusFull:
                    await asyncio.sleep(AGAIN_S)
                else:
                    return

    def _drain(self, dice: random.Random, process: Process) -> None:
        self._launcher.drain("the user wants it")

    def _power(self, dice: random.Random, process: Process) -> None:
        for other in list(self._launcher.alive):
            self._world.kill(other)
        self._restart(dice, process)

    def _lease(self, dice: random.Random, process: Process) -> None:
        leases = self._world.hub.runs[RUN].logs[LEASES.name]
        for seq in list(leases.entries):
            leases.remove(seq)

    def _garbage(self, dice: random.Random, process: Process) -> None:
        log = self._world.hub.runs[RUN].logs[dice.choice(ANYBODY_WRITES + self._of_episodes).name]
        if log.stream.name not in self._world.hub.full:
            log.store("garbage" if log.stream.keyed else "", dice.randbytes(dice.randint(0, 40)), {})

    def _audit(self, dice: random.Random, process: Process) -> None:
        self._audits += 1
        auditor = Process(self._world, "audit", self._audits)
        auditor.create_task(self._audited(SimBus(auditor)))

    async def _audited(self, bus: SimBus) -> None:
        """A sound log must be found sound at every moment."""
        try:
            audit = await audit_log(RunLog(bus, Path("nowhere"), ""))
        except (BusUnavailable, UserError):  # it cannot be reached just now
            return
        self._world.count("a running log was audited")
        for check in audit.report.checks:
            for example in check.examples[:1]:
                self._world.violate("audit", f"{check.name}, while it goes on: {example}")
