"""What a run did, as far as a replay compares with it: the recipes in force, the versions, the metrics of the steps."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bus.table import BATCHES, CONTROL, STEPS, WEIGHTS
from ops.log_source import LogSource
from ops.recipe import Recipe
from schemas import Control, StepDone, UserError, WeightVersion


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """The steps `start <= step < stop`, which one recipe trains."""

    start: int
    stop: int
    recipe: Recipe


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """A recorded run. `versions` by number, `metrics` by step, `starts` as (broker's Unix time, recipe).

    `steps` from 0 on can be replayed: their batches and the versions that they made are in the log.
    """

    run: str
    steps: int
    starts: tuple[tuple[float, Recipe], ...]
    versions: Mapping[int, WeightVersion]
    version_times: Mapping[int, float]
    metrics: Mapping[int, Mapping[str, float]]

    @property
    def recipe(self) -> Recipe:
        """The recipe of the newest start."""
        return self.starts[-1][1]

    def recipe_of(self, step: int) -> Recipe:
        """The recipe by which a step was trained: a resumed run may have changed it."""
        times = [time_s for time_s, _ in self.starts]
        return self.starts[max(0, bisect.bisect_right(times, self.version_times[step + 1]) - 1)][1]

    def phases(self, start: int, stop: int) -> list[Phase]:
        """The steps `start <= step < stop` as they were trained, split where the recipe changed for the trainer."""
        phases: list[Phase] = []
        for step in range(start, stop):
            recipe = self.recipe_of(step)
            if phases and _trains_alike(phases[-1].recipe, recipe):
                phases[-1] = dataclasses.replace(phases[-1], stop=step + 1)
            else:
                phases.append(Phase(step, step + 1, recipe))
        return phases


def _trains_alike(one: Recipe, other: Recipe) -> bool:
    return _of_the_trainer(one) == _of_the_trainer(other)


def _of_the_trainer(recipe: Recipe) -> Sequence[Any]:
    return recipe.trainer, recipe.rollout.temperature, recipe.rollout.dtype, recipe.seed


async def read_history(source: LogSource) -> History:
    """Read the small streams of a log. A run that has just begun has no steps yet.

    Raises:
        UserError: it holds no recipe, or one of another version of Rollstream.
    """
    starts = []
    async for entry in source.read(CONTROL):
        control = entry.message()
        if isinstance(control, Control) and control.action == "start":
            starts.append((entry.time_s, Recipe.from_yaml(control.recipe, f"the recipe in the log of {source.run}")))
    if not starts:
        raise _no_recipe(source)
    versions: dict[int, WeightVersion] = {}
    times: dict[int, float] = {}
    async for entry in source.read(WEIGHTS):
        version = entry.message()
        if isinstance(version, WeightVersion):
            versions[version.version] = version
            times[version.version] = entry.time_s
    metrics: dict[int, Mapping[str, float]] = {}
    async for entry in source.read(STEPS):
        done = entry.message()
        if isinstance(done, StepDone):
            metrics[done.step] = done.metrics
    batches = (await source.info(BATCHES)).last_seq  # batch i stands at sequence i + 1
    steps = 0
    while steps < batches and steps + 1 in versions:
        steps += 1
    return History(source.run, steps, tuple(starts), versions, times, metrics)


def _no_recipe(source: LogSource) -> UserError:
    return UserError(f"The log of {source.run} holds no start of the run, and so no recipe.", "Record it anew.")


def newest_recipe_of(source: LogSource) -> Recipe:
    """The recipe of the newest start. Raises `UserError` if the log holds none."""
    if not source.recipe_yaml:
        raise _no_recipe(source)
    return Recipe.from_yaml(source.recipe_yaml, f"the recipe in the log of {source.run}")


def check_range(history: History, start: int, stop: int | None) -> tuple[int, int]:
    """The steps `start <= step < stop` that a person means by `--from` and `--to`, of those that can be replayed.

    Raises:
        UserError: there are none.
    """
    if history.steps == 0:
        raise UserError(f"The log of {history.run} holds no training step.", "Let the run train first.")
    stop = history.steps if stop is None else stop
    if not 0 <= start < stop <= history.steps:
        raise UserError(
            f"--from {start} --to {stop} cannot be had: {history.run} has the steps 0 to {history.steps - 1}.",
            "--from is the first step, --to the first that is left out: --from 0 --to 10 are ten steps.",
        )
    return start, stop
