"""`rollstream bench staleness`: what stale samples cost, with naive PPO and with decoupled PPO.

The exact part is a controlled experiment: the plain loop, every batch exactly η versions old. The live part is the
whole system with its processes and its log, filled to the bound η instead of paced, so that its samples are as stale as
may be. All runs of a seed begin with the same warm start.

Each run that is done is a file. Interrupted and given again, the command goes on with those that are missing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ops.bench import Lab, command, describe_machine, publish, say
from ops.bench_staleness_report import PLOT, Study, plot, report
from ops.bench_staleness_run import Course
from ops.host import initial_model
from ops.recipe import Recipe, load_recipe
from ops.summary import Summary
from schemas import UserError

Loss = Literal["naive", "decoupled"]
LOSSES: dict[Loss, str] = {"naive": "ppo", "decoupled": "decoupled_ppo"}
# Four workers sample faster than the trainer learns, and no pace holds them back: what is sampled waits, and ages.
FILLED = ("controller.pace=false", "rollout.workers=4", "rollout.slots=128")


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One run of the study."""

    kind: Literal["exact", "live"]
    bound: int
    loss: Loss
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.bound}-{self.loss}-{self.seed}"


async def bench_staleness(
    recipe: Path,
    overrides: Sequence[str],
    *,
    bounds: Sequence[int],
    live: Sequence[int],
    seeds: int,
    steps: int,
    jobs: int,
    folder: Path,
    out: Path | None,
) -> int:
    """Make the runs that `folder` lacks, `jobs` at the same time; print the tables, write them and the plot to `out`.

    `bounds` are the staleness of the exact part, `live` the bounds of the live part, which may be none. Raises
    `UserError` if a run fails, or if the folder holds a study of something else.
    """
    changes = (*overrides, f"steps={steps}")
    resolved = load_recipe(recipe, changes)
    machine = describe_machine()
    _claim(folder, resolved)
    laboratory = Laboratory(recipe, changes, folder)
    cells = [Cell("exact", bound, loss, seed) for seed in range(seeds) for bound in bounds for loss in LOSSES]
    alone = [Cell("live", bound, loss, seed) for seed in range(seeds) for bound in live for loss in LOSSES]
    missing = [cell for cell in cells + alone if not laboratory.result(cell).exists()]
    say(f"{len(cells + alone)} runs, {len(missing)} of them to make, in {folder}")
    await _together([partial(laboratory.warm_start, seed) for seed in sorted({cell.seed for cell in missing})], jobs)
    progress = Progress(len(missing))
    await _together([partial(progress.told, laboratory, cell) for cell in missing if cell.kind == "exact"], jobs)
    # Each has many processes, whose speeds make the staleness: one at a time.
    await _together([partial(progress.told, laboratory, cell) for cell in missing if cell.kind == "live"], 1)

    def of(kind: str) -> Study:
        chosen = {(c.bound, c.loss, c.seed): laboratory.result(c) for c in cells + alone if c.kind == kind}
        return Study({key: Course.read(path) for key, path in chosen.items()})

    exact, filled = of("exact"), of("live")
    if out is not None:
        plot(exact, out.parent / PLOT)
    publish(report(exact, filled, resolved, machine, plotted=out is not None), out)
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class Laboratory:
    """The study's folder, where warm starts and runs are made, and where they are kept."""

    recipe: Path
    changes: Sequence[str]
    folder: Path

    def result(self, cell: Cell) -> Path:
        """Where the `Course` of a run is kept."""
        return self.folder / f"{cell}.json"

    async def warm_start(self, seed: int) -> None:
        """Version 0 of all runs of a seed, unless it is there."""
        place = self.folder / f"warm-{seed}"
        if not initial_model(place).exists():
            say(f"making the warm start of seed {seed}")
            arguments = ("cli", "sft", str(self.recipe), *self.changes, f"seed={seed}", "--dir", str(place))
            await command(arguments, self.folder / f"warm-{seed}.txt")

    async def run(self, cell: Cell) -> Course:
        """Make a run in processes of its own. Raises `UserError` if it fails."""
        initial = initial_model(self.folder / f"warm-{cell.seed}")
        changes = (*self.changes, f"seed={cell.seed}", f"trainer.loss={LOSSES[cell.loss]}")
        if cell.kind == "exact":
            await self._exact(cell, initial, changes)
        else:
            await self._live(cell, initial, changes)
        return Course.read(self.result(cell))

    async def _exact(self, cell: Cell, initial: Path, changes: Sequence[str]) -> None:
        resolved = load_recipe(self.recipe, (*changes, f"model={{path: '{initial.resolve()}'}}", "sft=null"))
        told = self.folder / f"{cell}.yaml"
        told.write_text(resolved.to_yaml())
        arguments = ("ops.bench_staleness_run", str(told), str(initial), str(cell.bound), str(self.result(cell)))
        await command(arguments, self.folder / f"{cell}.txt")

    async def _live(self, cell: Cell, initial: Path, changes: Sequence[str]) -> None:
        count = load_recipe(self.recipe, changes).evaluation.count
        filled = (*FILLED, f"controller.max_staleness={cell.bound}", f"evaluation.count={count}")
        shutil.rmtree(self.folder / str(cell), ignore_errors=True)  # of a run that was interrupted
        summary, _ = await Lab(self.folder, self.recipe, initial.resolve()).run(str(cell), (*changes, *filled))
        course_of(summary).write(self.result(cell))
        shutil.rmtree(self.folder / str(cell))


def course_of(summary: Summary) -> Course:
    """A run of the whole system as a `Course`; a step whose metric is not known counts as 0 there."""
    names = {name: name for name in ("reward", "clip_fraction", "mismatch_kl", "grad_norm", "entropy")}
    taken = names | {"staleness": "staleness_mean"}
    return Course(
        {name: [value or 0.0 for value in summary.series[of]] for name, of in taken.items()}, summary.evaluations
    )


def numbers(text: str, option: str) -> list[int]:
    """The staleness bounds in "0,4,16", ascending and each once; none in "none". Raises `UserError`."""
    if text == "none":
        return []
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [-1]
    if found[0] < 0:
        raise UserError(f"{option} {text}: these are no staleness bounds.", f"Write such as {option} 0,4,16.")
    return found


class Progress:
    """Tells of each run that is done, and about how long the rest will take."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._done = 0
        self._started = time.monotonic()

    async def told(self, laboratory: Laboratory, cell: Cell) -> None:
        """Make the run, and tell of it."""
        course = await laboratory.run(cell)
        self._done += 1
        each_s = (time.monotonic() - self._started) / self._done
        rewards = course.series["reward"]
        say(
            f"{self._done} of {self._runs}: {cell}: mean reward {sum(rewards) / len(rewards):.3f}; "
            f"about {each_s * (self._runs - self._done) / 60:.0f} min left"
        )


async def _together(works: Sequence[Callable[[], Coroutine[Any, Any, None]]], jobs: int) -> None:
    """All of them, at most `jobs` at the same time, begun in their order; if one fails, the others are ended."""
    free = asyncio.Semaphore(jobs)

    async def one(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with free:
            await work()

    running = [asyncio.create_task(one(work)) for work in works]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _claim(folder: Path, recipe: Recipe) -> None:
    """Make the folder the study's of this recipe. Raises `UserError` if it is that of another."""
    record = folder / "study.json"
    mine = json.dumps({"recipe": recipe.to_yaml()})
    if folder.exists() and any(folder.iterdir()) and (not record.exists() or record.read_text() != mine):
        raise UserError(f"{folder} is not the folder of this study with these settings.", "Give another --dir.")
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(mine)
