"""Which processes a run has on its launcher's machine, and how many workers: `rollstream scale` changes that.

The wanted number is a message of the log, so it outlives the launcher: a resumed run has as many workers as it was last
told. The launcher compares what is wanted with what runs, again and again, so a command that is given twice does
nothing the second time. A worker that is to leave gets SIGTERM: it hands its samples over and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import structlog

from bus.port import Bus, Entry
from bus.reading import read_to_end
from bus.table import CONTROL
from ops.host import ProcessSpec, Role
from ops.recipe import Recipe
from ops.supervise import Supervisor
from schemas import Control, MalformedMessage, UserError

if TYPE_CHECKING:
    from ops.launch import Where

log = structlog.get_logger()

SCALABLE: tuple[Role, ...] = ("rollout", "reward", "episode")
LOOK_EVERY_S = 0.25
READ_S = 30.0


def recipe_workers(recipe: Recipe) -> dict[Role, int]:
    """The numbers of workers that a recipe asks for."""
    workers: dict[Role, int] = {"rollout": recipe.rollout.workers, "reward": recipe.reward.workers}
    return workers | ({"episode": recipe.episode.workers} if recipe.episode is not None else {})


def fewest(recipe: Recipe, role: Role) -> int:
    """How many workers of a role cannot be taken away: those that share the controller's process."""
    return recipe.reward.workers if role == "reward" and recipe.processes == "shared" else 0


def specs(recipe: Recipe, where: Where, workers: Mapping[Role, int] | None = None) -> list[ProcessSpec]:
    """The processes of a run on one machine: heavy actors have one each, the light ones share one by default.

    `workers` are numbers by role, for those of the recipe.
    """
    wanted = recipe_workers(recipe) | dict(workers or {})
    light: list[tuple[Role, str]] = [("controller", "controller")]
    light.extend(("reward", f"reward-{i}") for i in range(recipe.reward.workers))
    alone: list[tuple[Role, str]] = [("trainer", "trainer")] if recipe.trainer.ranks else []
    if recipe.processes == "shared":
        processes = [tuple(light)]
        alone.extend(("reward", f"reward-{i}") for i in range(recipe.reward.workers, wanted["reward"]))
    else:
        processes = [(light[0],)]
        alone.extend(("reward", f"reward-{i}") for i in range(wanted["reward"]))
    alone.extend(("rollout", f"rollout-{i}") for i in range(wanted["rollout"]))
    if recipe.episode is not None:
        alone.extend(("episode", f"episode-{i}") for i in range(wanted["episode"]))
    if recipe.evaluation.every and recipe.evaluation.count:
        alone.extend(("evaluator", f"evaluator-{i}") for i in range(recipe.evaluation.workers))
    text = recipe.to_yaml()
    return [
        ProcessSpec(actors, where.run, where.url, where.folder, text)
        for actors in (*processes, *((actor,) for actor in alone))
    ]


class Wanted:
    """The numbers of workers that the control messages ask for, folded in order: the newest word holds.

    Each start brings its recipe along. That is a new word only where it says another number than the start before it,
    so a run that is resumed with the same recipe keeps what `scale` made of it.
    """

    def __init__(self) -> None:
        self.workers: dict[Role, int] = {}
        self.seq = 0
        self._recipe: dict[Role, int] = {}

    def take(self, entry: Entry) -> None:
        """Take the next entry of the control stream."""
        self.seq = max(self.seq, entry.seq)
        try:
            message = entry.message()
        except MalformedMessage:
            return
        if not isinstance(message, Control):
            return
        if message.action == "scale":
            self.workers |= {role: int(message.workers[role]) for role in SCALABLE if role in message.workers}
        elif message.action == "start":
            with contextlib.suppress(UserError):  # a recipe of another program says nothing
                now = recipe_workers(Recipe.from_yaml(message.recipe))
                self.workers |= {role: count for role, count in now.items() if self._recipe.get(role) != count}
                self._recipe = now


async def read_wanted(bus: Bus) -> Wanted:
    """What the log asks for now."""
    wanted = Wanted()
    async for entry in read_to_end(bus, CONTROL, silence_s=READ_S):
        wanted.take(entry)
    return wanted


class Crew:
    """Keeps the processes of a run on this machine at the numbers that the log asks for."""

    def __init__(self, supervisor: Supervisor, recipe: Recipe, where: Where) -> None:
        self._supervisor = supervisor
        self._recipe = recipe
        self._where = where
        self._wanted = Wanted()
        self._applied_seq = 0

    @property
    def workers(self) -> dict[Role, int]:
        """Wanted on this machine, by role."""
        asked = recipe_workers(self._recipe) | self._wanted.workers
        return {role: max(count, fewest(self._recipe, role)) for role, count in asked.items()}

    async def start(self, bus: Bus) -> None:
        """Start everything, in the numbers that the log asks for."""
        self._wanted = await read_wanted(bus)
        for spec in specs(self._recipe, self._where, self.workers):
            await self._supervisor.start(spec)
        self._applied_seq = self._wanted.seq

    async def follow(self, bus: Bus) -> None:
        """Start and end workers as the log asks, for ever."""
        entries: asyncio.Queue[Entry] = asyncio.Queue(1)
        reading = asyncio.create_task(_pump(bus, self._wanted.seq + 1, entries), name="reads control messages")
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    self._wanted.take(await asyncio.wait_for(entries.get(), LOOK_EVERY_S))
                if reading.done():
                    reading.result()
                await self._settle()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _settle(self) -> None:
        """One look: end who is too many, start who is missing. A name is free again once its process has ended."""
        supervisor, seq = self._supervisor, self._wanted.seq
        if supervisor.draining:
            return
        wanted = {spec.name: spec for spec in specs(self._recipe, self._where, self.workers)}
        for name in supervisor.names - wanted.keys():
            supervisor.leave(name)
        for name in wanted.keys() - supervisor.names:
            await supervisor.start(wanted[name])
        self._applied_seq = seq

    def gauges(self) -> dict[str, Any]:
        """For the launcher's beat: what is wanted, what runs, who is leaving, and up to where the log is obeyed."""
        names, leaving = self._supervisor.names, self._supervisor.leaving
        told: dict[str, Any] = {"control_seq": self._applied_seq}
        for role, count in self.workers.items():
            told[f"{role}_wanted"] = count
            told[f"{role}_leaving"] = sum(name.startswith(f"{role}-") for name in leaving)
            shared = fewest(self._recipe, role)
            told[f"{role}_here"] = shared + sum(name.startswith(f"{role}-") for name in names - leaving)
        return told


async def _pump(bus: Bus, start: int, entries: asyncio.Queue[Entry]) -> None:
    async for entry in bus.read(CONTROL, start):
        await entries.put(entry)
