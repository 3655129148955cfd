"""`rollstream status`: how a run stands, read from its log and from the beats of its actors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from bus.port import Bus
from bus.table import (
    BATCHES,
    CONSUMERS,
    CONTROL,
    DEAD,
    DROPPED,
    EVALUATIONS,
    PROMPTS,
    ROLLOUTS,
    SCORED,
    STEPS,
    WEIGHTS,
)
from ops.evaluate import eval_set
from ops.evaluations import read_evaluations
from ops.folders import find_folder, go_on, is_down
from ops.launch import Where, locate
from ops.recipe import Recipe
from ops.summary import Summary, print_summary
from ops.view import RunView
from ops.workers import SCALABLE
from schemas import Control, StepDone, UserError, WeightVersion

LISTEN_S = 1.5  # beats come once a second
SHOWN = (PROMPTS, ROLLOUTS, SCORED, BATCHES, WEIGHTS, STEPS, DROPPED, EVALUATIONS, DEAD)


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """A run at one moment. `streams` and `queues` map names to their counts; `step` is the newest finished one.

    `evaluations` maps versions to their mean held-out reward.
    `workers` maps a role to how many are `wanted` on the launcher's machine, are `here`, and are `leaving` it.
    """

    run: str
    steps_planned: int
    step: int | None
    version: int | None
    metrics: dict[str, float]
    seconds_since_step: float | None
    streams: dict[str, dict[str, int]]
    queues: dict[str, dict[str, int]]
    workers: dict[str, dict[str, int]]
    evaluations: dict[int, float | None]
    actors: list[dict[str, Any]]

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.step is not None and self.step + 1 >= self.steps_planned


async def read_status(bus: Bus, listen_s: float = LISTEN_S) -> Status:
    """The state of the run on a connected bus. Raises `UserError` if the server knows no such run."""
    if not await bus.exists():
        raise UserError(f"The server has no run {bus.run}.", "Check the name, or start it: rollstream run RECIPE")
    recipe = await _recipe(bus)
    view = RunView(bus.run, recipe.steps if recipe else 0, 0, 0, time.time())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(listen_s):
            async for beat in bus.beats():
                view.beat(beat, time.time())
    newest, weights = await bus.last(STEPS), await bus.last(WEIGHTS)
    step = newest.message() if newest else None
    version = weights.message() if weights else None
    done = step if isinstance(step, StepDone) else None
    streams = {}
    for stream in SHOWN:
        info = await bus.info(stream)
        streams[stream.name] = {"written": info.last_seq, "kept": info.messages, "bytes": info.nbytes}
    queues = {}
    for consumer in CONSUMERS:
        backlog = await bus.backlog(consumer)
        queues[consumer.name] = {"waiting": backlog.pending, "in_work": backlog.ack_pending}
    evaluations = await read_evaluations(bus, eval_set(recipe)) if recipe else {}
    return Status(
        run=bus.run,
        steps_planned=view.steps,
        step=done.step if done else None,
        version=version.version if isinstance(version, WeightVersion) else None,
        metrics=dict(done.metrics) if done else {},
        seconds_since_step=max(0.0, time.time() - newest.time_s) if newest else None,
        streams=streams,
        queues=queues,
        workers=_workers(view),
        evaluations={version: one.reward for version, one in evaluations.items()},
        actors=[
            {
                "actor": actor.actor, "role": actor.role, "process": actor.process, "state": actor.state,
                "idle_share": actor.idle_share, "waits_for": actor.idle_why,
                "cpu_s": view.processes[actor.process].cpu_s,
            }
            for actor in view.by_role()
        ],
    )  # fmt: skip


def _workers(view: RunView) -> dict[str, dict[str, int]]:
    launcher = view.actors.get("launcher")
    gauges = launcher.gauges if launcher is not None else {}
    return {
        role: {what: int(gauges[f"{role}_{what}"]) for what in ("wanted", "here", "leaving")}
        for role in SCALABLE
        if f"{role}_wanted" in gauges
    }


async def _recipe(bus: Bus) -> Recipe | None:
    """The recipe that the run was last started with."""
    info = await bus.info(CONTROL)
    found = None
    for seq in range(info.first_seq, info.last_seq + 1):
        for entry in await bus.get(CONTROL, [seq]):
            message = entry.message()
            if isinstance(message, Control) and message.recipe:
                found = Recipe.from_yaml(message.recipe)
    return found


async def main(target: str | None, as_json: bool, url: str | None = None, run_name: str | None = None) -> int:
    """Print the status of a run: of a folder, or of `run_name` on the server at `url`. Returns the exit status.

    A run that is not up is told by its last summary. Raises `UserError` if there is neither.
    """
    from bus.jetstream import JetStreamBus

    where = locate(find_folder(target) if run_name is None else None, run_name, url)
    if run_name is None and await is_down(where.url):
        return _ended(where, as_json)
    bus = JetStreamBus(where.run, where.url, "status")
    await bus.connect()
    try:
        status = await read_status(bus)
    finally:
        await bus.close()
    if as_json:
        print(json.dumps(dataclasses.asdict(status) | {"finished": status.finished}))
    else:
        print_status(status)
    return 0


def _ended(where: Where, as_json: bool) -> int:
    file = where.folder / "summary.json"
    try:
        text = file.read_text()
        summary = Summary.from_json(text)
        older = (where.folder / "run.json").stat().st_mtime > file.stat().st_mtime
    except (OSError, ValueError):
        raise UserError(
            f"The run {where.run} is not up, and has left no summary in {where.folder}.",
            go_on(where.folder),
        ) from None
    if older:
        print(
            f"{where.run} is not up. Its newest start was killed, or ended by an error, and left no summary; this is "
            f"that of the one before. {go_on(where.folder)}",
            file=sys.stderr,
        )
    if as_json:
        print(text)
    else:
        print(f"{where.run} ended like this:" if older else f"{where.run} is not up; it ended like this:")
        print_summary(summary)
    return 0


def print_status(status: Status, console: Console | None = None) -> None:
    """Print it as tables."""
    console = console or Console()
    done = 0 if status.step is None else status.step + 1
    of = f" of {status.steps_planned}" if status.steps_planned else ""
    ago = "" if status.seconds_since_step is None else f", the last {status.seconds_since_step:.0f} s ago"
    version = "none published" if status.version is None else str(status.version)
    console.print(f"[bold]{status.run}[/]: {done}{of} steps done{ago}; weight version {version}", highlight=False)
    told = [
        f"{name} {status.metrics[name]:.3f}"
        for name in ("reward_mean", "entropy", "grad_norm")
        if name in status.metrics
    ]
    if told:
        console.print(f"last step: {', '.join(told)}", highlight=False)
    scored = {version: reward for version, reward in status.evaluations.items() if reward is not None}
    if scored:
        newest, best = max(scored), max(scored, key=lambda version: (scored[version], -version))
        text = f"held-out reward {scored[newest]:.3f} (version {newest}), best {scored[best]:.3f} (version {best})"
        console.print(text, highlight=False)
    streams = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    streams.add_column("stream")
    for heading in ("messages", "MB", "waiting for a worker", "in work"):
        streams.add_column(heading, justify="right")
    queue_of = {consumer.stream.name: status.queues[consumer.name] for consumer in CONSUMERS}
    for name, counts in status.streams.items():
        queue = queue_of.get(name)
        backlog = (str(queue["waiting"]), str(queue["in_work"])) if queue else ("", "")
        streams.add_row(name, f"{counts['written']:,}", f"{counts['bytes'] / 1e6:.1f}", *backlog)
    console.print(streams)
    for role, count in status.workers.items():
        leaving = f", {count['leaving']} leaving" if count["leaving"] else ""
        console.print(
            f"{role} workers beside the launcher: {count['here']} of {count['wanted']}{leaving}", highlight=False
        )
    if not status.actors:
        console.print("No actor was heard: the run is stopped, or its workers are down.")
        return
    actors = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("actor", "process", "state", "idle", "CPU s"):
        actors.add_column(heading, no_wrap=True)
    for actor in status.actors:
        idle = "–" if actor["idle_share"] is None else f"{actor['idle_share']:.0%}"
        actors.add_row(actor["actor"], actor["process"], actor["state"], idle, f"{actor['cpu_s']:.1f}")
    console.print(actors)
