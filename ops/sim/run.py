"""One simulated run, from the start record to the end of its last process: the launcher's part, and the faults in time.

For tests: `simulate(scenario)` runs the production actors in this process and returns an `Outcome`.
`scenario.draw(seed)` makes the scenario of a seed, `Scenario(seed, ...)` one by hand. A planted bug is a patch of
production code around calls of `simulate`, such as `unittest.mock.patch.object(bus.shell._Shell, "_settle", wrong)`; it
is found if the `violations` of some outcome are not empty. Each violation names its invariant: I1 to I8 as in the audit
and the design, `log` for records that contradict each other, `audit` for what only the production audit found,
`errors` for an actor that failed as none should, or left a task behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog

from actors.controller.actor import Controller
from actors.controller.config import ControllerConfig
from actors.episode.actor import EpisodeWorker
from actors.episode.config import EpisodeConfig
from actors.reward.actor import RewardWorker
from actors.reward.config import RewardConfig
from actors.rollout.actor import RolloutWorker
from actors.rollout.config import RolloutConfig
from actors.trainer.actor import Trainer
from actors.trainer.config import PublishConfig, TrainerConfig
from bus.memory import MemoryBus
from bus.port import BusFull, BusUnavailable, Entry, Fenced
from bus.table import LEASES
from ops.host import Actor, Role, as_user_error, run_actors
from ops.sim.checkers import Checker
from ops.sim.episodes import FakeEpisode
from ops.sim.fakes import (
    Disk,
    FakeEngine,
    FakeLearner,
    FakePool,
    FakeTokenizer,
    MemoryCheckpoints,
    row_of,
)
from ops.sim.loop import Deadlock
from ops.sim.nemesis import Nemesis
from ops.sim.network import SimBus
from ops.sim.scenario import Scenario, kind_of
from ops.sim.weights import MemoryWeights, MemoryWriter
from ops.sim.world import RUN, Process, Violation, World
from schemas import Control, UserError

CALM_S: Final = 600.0  # virtual time after the last fault in which a new version must come, and after that the end
LOOK_S: Final = 30.0
EPISODE_S: Final = 86_400.0  # none is late: what an answer takes, the checkers look at
DRAIN_S: Final = 30.0
LEFT_S: Final = 60.0  # for what a killed process leaves to end
CHILDREN: Final = 2
FAILS: Final = {"reward_fails", "episode_fails"}
CUTS: Final = {"partition", "restart", "power", "lost_answer", "slow_call"}  # after which the log may not be reached


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. `struck` names the faults that struck, `situations` counts what was reached."""

    scenario: Scenario
    violations: tuple[Violation, ...]
    trace_hash: str
    trace: tuple[str, ...]
    struck: tuple[str, ...]
    situations: dict[str, int]
    virtual_s: float

    @property
    def clean(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations


def simulate(scenario: Scenario, keep_trace: bool = False) -> Outcome:
    """Run a scenario to its end, or to the first broken promise."""
    with _quietly():
        world = World(scenario, keep_trace)
        launcher = _Launcher(world)
        try:
            world.loop.run_until_complete(launcher.run())
        except Deadlock as error:
            world.violate("I8", str(error))
        finally:
            world.loop.close()
        return Outcome(
            scenario,
            tuple(world.violations),
            world.trace_hash,
            tuple(world.trace),
            tuple(world.struck),
            dict(sorted(world.situations.items())),
            world.loop.time(),
        )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """No log lines; and no garbage collection in the midst, whose moments are not the seed's."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
        structlog.configure(**before)


@dataclasses.dataclass(slots=True)
class Spec:
    """A process that the launcher keeps alive. `process` is its present life."""

    name: str
    actors: tuple[tuple[Role, str], ...]
    lives: int = 0
    process: Process | None = None
    done: bool = False


class _Launcher:
    """What `ops.launch` and `ops.supervise` are to real processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.recipe = world.scenario  # as of the last start
        self.starts = 0
        self.disk = Disk()
        self.checker = Checker(world, self.disk)
        world.on_stored = self._stored
        world.on_given = self.checker.given
        world.on_acknowledged = self.checker.acknowledged
        world.on_killed = self._killed
        world.on_stopped = self.succeed
        self.specs = [Spec(name, actors) for name, actors in _layout(world.scenario)]
        self.alive: list[Process] = []  # also those that were stopped and succeeded
        self.everybody: list[Process] = []
        self.controllers: list[tuple[Process, Controller]] = []
        self.draining = False
        self.changed = asyncio.Event()
        self.nemesis = Nemesis(world, self)

    async def run(self) -> None:
        """The whole run."""
        world = self.world
        await MemoryBus(RUN, world.hub).setup(world.scenario.ack_wait_s)
        await self._start()
        side = [world.loop.create_task(work) for work in self.nemesis.works()]
        try:
            await self._until_done()
            if world.scenario.more_steps and not world.violations:
                world.note("the run is resumed for more steps")
                self.recipe = dataclasses.replace(self.recipe, steps=self.recipe.steps + world.scenario.more_steps)
                await self._start()
                await self._until_done()
        finally:
            for task in side:
                task.cancel()
            for ended in await asyncio.gather(*side, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended
        if not world.violations:
            self.checker.finish(world.hub)
            await self._settle()
        for process in list(self.alive):
            world.kill(process)
        await self._cancel_all()

    async def _start(self) -> None:
        """Start or resume the run. What its actors are told may have changed."""
        if self.starts:
            self.recipe = dataclasses.replace(self.recipe, **self.world.scenario.later)
        self.starts += 1
        self.checker.started(self.recipe)
        await self.nemesis.published(Control(action="start", nonce=f"start-{self.starts}"))
        self.draining = False
        for spec in self.specs:
            self.start(spec)

    def _stored(self, entry: Entry) -> None:
        self.checker.stored(entry)
        if entry.stream is LEASES:
            leaders = [process for process, actor in self.controllers if not process.dead and actor.core is not None]
            if len(leaders) > 1:
                self.world.count("two controllers lead")

    async def _until_done(self) -> None:
        while not self.world.failed.is_set() and (self.draining or self.alive or not all(s.done for s in self.specs)):
            now_s = self.world.loop.time()
            if now_s > max(self.world.scenario.quiet_s, self.checker.progress_s) + CALM_S:
                self.world.violate("I8", f"no progress for {CALM_S:.0f} s without a fault; {self._state()}")
            self.changed.clear()
            waiting = [self.world.loop.create_task(event.wait()) for event in (self.changed, self.world.failed)]
            await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()

    async def _settle(self) -> None:
        """No task may be left of processes that have ended, however they did."""
        until_s = self.world.loop.time() + LEFT_S
        while left := [task for process in self.everybody for task in process.tasks]:
            if self.world.loop.time() > until_s:
                self.world.violate("errors", f"a process has ended and left {left[0]!r}")
                return
            await asyncio.sleep(1.0)

    async def _cancel_all(self) -> None:
        me = asyncio.current_task()
        for _ in range(5):
            left = [task for task in asyncio.all_tasks() if task is not me]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=LEFT_S)

    def _state(self) -> str:
        checker = self.checker
        return (
            f"version {checker.newest}, {len(checker.batches)} batches, {len(checker.prompts)} admitted, "
            f"{len(checker.trained)} trained, {len(checker.dropped)} dropped; alive: {', '.join(map(str, self.alive))}"
        )

    # ---- processes

    def start(self, spec: Spec) -> None:
        """Start a process, or its next life."""
        if spec.process is not None or self.draining:
            return
        spec.lives += 1
        spec.done = False
        process = spec.process = Process(self.world, spec.name, spec.lives)
        self.alive.append(process)
        self.everybody.append(process)
        self.world.note("started", process)
        process.create_task(self._main(spec, process)).add_done_callback(lambda task: self._ended(spec, process, task))

    def succeed(self, stopped: Process) -> None:
        """Start a process in the place of one that was stopped and is held to be dead."""
        for spec in self.specs:
            if spec.process is stopped and stopped.stopped and not self.draining:
                self.world.count("a stopped process had a successor")
                spec.process = None
                self.start(spec)

    async def _main(self, spec: Spec, process: Process) -> bool:
        bus = SimBus(process)
        actors = [(role, name, self._actor(role, name, process, bus)) for role, name in spec.actors]
        return await run_actors(bus, self.recipe.steps, actors, process.stop)

    def _actor(self, role: Role, name: str, process: Process, bus: SimBus) -> Actor:
        scenario, disk = self.recipe, self.disk
        if role == "controller":
            config = ControllerConfig(
                max_staleness=scenario.max_staleness,
                batch_groups=scenario.batch_groups,
                group_size=scenario.group_size,
                on_stale=scenario.on_stale,
                filter=scenario.filter,
                pace=scenario.pace,
            )
            share = scenario.equal_share
            controller = Controller(bus, config, scenario.steps, scenario.seed, lambda k: row_of(k, share), name)
            self.controllers.append((process, controller))
            return controller
        if role == "reward":
            return RewardWorker(bus, RewardConfig(children=CHILDREN), FakePool(process, CHILDREN), name)
        if role == "rollout":
            rollout = RolloutConfig(
                slots=scenario.slots,
                max_new_tokens=scenario.max_new_tokens,
                on_update=scenario.on_update,
                partial_every=scenario.partial_every,
            )
            weights = MemoryWeights(process, disk, bus)
            engine = FakeEngine(process, disk, weights.made)
            turns = scenario.episodes > 0
            return RolloutWorker(bus, rollout, engine, FakeTokenizer(), (), weights, name, turns=turns)
        if role == "episode":
            episode = EpisodeConfig(
                at_once=scenario.at_once,
                timeout_s=EPISODE_S,
                max_turns=scenario.max_turns,
                max_tokens=scenario.max_tokens,
                samples="turn" if scenario.per_turn else "trajectory",
            )
            function = FakeEpisode(process, self.checker.episodes, scenario.replayable)
            return EpisodeWorker(bus, episode, function, FakeTokenizer(), scenario.max_new_tokens, name)
        trainer = TrainerConfig(
            checkpoint_every=scenario.checkpoint_every,
            keep_checkpoints=scenario.keep_checkpoints,
            keep_versions=scenario.keep_versions,
            publish=PublishConfig(overlap=scenario.overlap),
        )
        learner = FakeLearner(process, disk)
        return Trainer(
            bus,
            trainer,
            scenario.steps,
            learner,
            learner.tensors,
            learner.export,
            MemoryWriter(process, disk, scenario.full_every),
            MemoryCheckpoints(process, disk, scenario.keep_checkpoints),
            name,
        )

    def _ended(self, spec: Spec, process: Process, task: asyncio.Task[bool]) -> None:
        if process.dead:  # long since
            if not task.cancelled():
                task.exception()
            return
        error = task.exception()
        how = repr(error) if error else "done" if task.result() else "stopped"
        self.world.note(f"ended: {how}", process)
        if error is None:
            self.checker.left(process)
        mendable = self._judge(process, error)
        if mendable and not self.draining:
            self.drain(f"{process} ended")
        self._gone(process, done=how == "done")

    def _killed(self, process: Process) -> None:
        if process in self.alive:
            self._gone(process, done=False)

    def _gone(self, process: Process, done: bool) -> None:
        self.alive.remove(process)
        self.changed.set()
        for spec in self.specs:
            if spec.process is process:
                spec.process = None
                spec.done = done
                if not done and not self.draining:
                    restart_s = process.dice("restart").expovariate(1 / self.world.scenario.restart_s)
                    self.world.later(restart_s, self.start, spec)

    def _judge(self, process: Process, error: BaseException | None) -> bool:
        """Whether the user must mend something before the run can go on. An error that is not due breaks a promise."""
        if error is None:
            return False
        struck = {kind_of(name) for name in self.world.struck}
        self.world.count(f"a process ended: {type(error).__name__}")
        mendable = as_user_error(error, Path("disk")) if isinstance(error, Exception) else None
        due = (
            (isinstance(error, BusFull) and "full" in struck)
            or (isinstance(error, OSError) and "disk_full" in struck)
            or (isinstance(error, UserError) and bool(struck & FAILS) and _tells_of_failures(error.message))
            or (isinstance(error, BusUnavailable) and bool(struck & CUTS))
        )
        if isinstance(error, Fenced):
            self.world.violate("I7", f"{process} ended: {error}")
        elif not due:
            self.world.violate("errors", f"{process} ended: {error!r}")
        return mendable is not None

    def drain(self, why: str) -> None:
        """Stop the whole run in order, mend what is to be mended, and resume it."""
        if self.draining:
            return
        self.world.note(f"the run is drained: {why}")
        self.world.count("the run was drained and resumed")
        self.draining = True
        self.world.later(0.0, lambda: self.world.loop.create_task(self._drain()))

    async def _drain(self) -> None:
        for process in list(self.alive):
            process.stop.set()
        until_s = self.world.loop.time() + DRAIN_S
        while self.alive:
            if self.world.loop.time() > until_s:
                for process in list(self.alive):
                    self.world.kill(process)
            await asyncio.sleep(0.1)
        while self.world.hub.full:
            await asyncio.sleep(0.1)
        await asyncio.sleep(self.world.dice("restarts").uniform(0.0, 2.0))
        self.world.note("the run is resumed")
        await self._start()


def _tells_of_failures(message: str) -> bool:
    return any(words in message for words in ("reward function", "The episode", "ended since the last batch failed"))


def _layout(scenario: Scenario) -> list[tuple[str, tuple[tuple[Role, str], ...]]]:
    """Process names and their actors, as `ops.launch.specs` and `rollstream up` lay them out."""
    light: list[tuple[Role, str]] = [("controller", "controller")]
    light.extend(("reward", f"reward-{i}") for i in range(scenario.rewarders))
    together = [tuple(light)] if scenario.shared else [(actor,) for actor in light]
    alone: list[tuple[Role, str]] = [("controller", f"controller-{i}") for i in range(1, scenario.controllers)]
    alone.extend(("trainer", f"trainer-{i}") for i in range(scenario.trainers))
    alone.extend(("rollout", f"rollout-{i}") for i in range(scenario.workers))
    alone.extend(("episode", f"episode-{i}") for i in range(scenario.episodes))
    return [("+".join(name for _, name in actors), actors) for actors in (*together, *((actor,) for actor in alone))]
