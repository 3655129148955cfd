"""`rollstream replay trainer`: the same weights from the same log, or two curves from one log."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ops.console import open_console, tell_damage
from ops.findings import REPLAYED, Check
from ops.folders import NEW_FOLDER
from ops.log_source import LogSource, RunLog, initial_model_of, open_log
from ops.progress import Progress, stopped_by_ctrl_c
from ops.replay.changes import Changes, Rebatcher, read_changes
from ops.replay.compare import CAVEAT, ComparedStep, largest_difference, plot_comparison, print_comparison
from ops.replay.history import History, Phase, check_range, read_history
from ops.replay.trainer import replay_trainer
from schemas import StepDone, UserError, WeightVersion

if TYPE_CHECKING:
    from actors.trainer.learner import Learner

STEPS_FILE, RESULT_FILE, PLOT_FILE = "steps.jsonl", "replay.json", "comparison.png"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay of the steps `start <= step < stop` came to; `done` is the first step that was not replayed.

    `versions` were compared, among them that before the first step; `first_difference` is the first version whose
    weights are not the recorded ones. `changes` are the overrides; with any, versions after `start` are not compared.
    """

    run: str
    start: int
    stop: int
    done: int
    changes: tuple[str, ...]
    rescored: bool
    versions: int
    first_difference: int | None
    expected_digest: str
    found_digest: str
    left_out: int
    seconds: float

    @property
    def identical(self) -> bool:
        """Whether every version that was compared is bit-identical."""
        return self.first_difference is None


class _Watch:
    """Compares what the replayed trainer publishes with the log, and keeps the steps from `start` on."""

    def __init__(self, history: History, start: int, changed: bool, stop: asyncio.Event, progress: Progress) -> None:
        self.steps: list[ComparedStep] = []
        self.versions = 0
        self.difference: tuple[int, str, str] | None = None  # version, recorded digest, replayed digest
        self.version = 0
        self._history = history
        self._start = start
        self._changed = changed
        self._stop = stop
        self._progress = progress
        self._digest = ""
        self._lines: list[Path] = []

    def write_to(self, file: Path) -> None:
        """Append every step to a file as it comes."""
        self._lines.append(file)

    async def on_weights(self, event: WeightVersion, learner: Learner) -> None:
        self.version, self._digest = event.version, event.result_digest
        self._progress.show(event.version)
        if self._changed and event.version > self._start:
            return
        recorded = self._history.versions.get(event.version)
        if recorded is None:
            return
        self.versions += 1
        if recorded.result_digest != event.result_digest:
            self.difference = event.version, recorded.result_digest, event.result_digest
            self._stop.set()  # whatever comes after follows from it

    async def on_step(self, done: StepDone) -> None:
        if done.step < self._start:
            return
        recorded = self._history.versions[done.version].result_digest
        step = ComparedStep(done.step, self._history.metrics.get(done.step, {}), done.metrics, recorded, self._digest)
        self.steps.append(step)
        for file in self._lines:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(step.to_json() + "\n")


async def main(
    target: str | None, overrides: Sequence[str], start: int, stop: int | None, out: Path | None, rescore: bool
) -> int:
    """Replay into a trainer and tell what came of it.

    0 if the weights are the recorded ones, or, with changes, if both curves were told; 1 if weights differ that should
    not; 130 after Ctrl-C.

    Raises:
        UserError: the log or the changes do not allow it.
    """
    changes = read_changes(overrides, reward=rescore)
    changed = bool(changes.overrides) or rescore
    console = open_console()
    async with open_log(target) as source:
        if out is not None or changed:
            out = out or Path("replays") / time.strftime("%Y%m%d-%H%M%S")
            _claim(out)
        try:
            outcome, steps = await replay_log(source, changes, start, stop, out=out, rescore=rescore, progress=True)
        except UserError:
            if out is not None:
                with contextlib.suppress(OSError):  # it holds something
                    out.rmdir()
            raise
        tell_damage(source.damage, console)
    if out is not None:
        (out / RESULT_FILE).write_text(json.dumps(dataclasses.asdict(outcome), indent=1) + "\n")
    if changed and outcome.identical and steps:
        _tell_comparison(outcome, steps, out, console)
    _tell(outcome, console, changed)
    if out is not None and (out / STEPS_FILE).exists():
        console.print(f"every step of both: {out / STEPS_FILE}", markup=False, soft_wrap=True)
    if not outcome.identical:
        return 1
    return 0 if outcome.done >= outcome.stop else 130


async def replay_log(
    source: LogSource,
    changes: Changes,
    start: int = 0,
    stop: int | None = None,
    *,
    out: Path | None = None,
    rescore: bool = False,
    progress: bool = False,
) -> tuple[Outcome, list[ComparedStep]]:
    """Replay a log into a trainer; with `out`, steps are appended to a file there, and the model is exported.

    Steps before `start` are trained as they were, from the nearest checkpoint that the run's folder holds.
    """
    began = time.monotonic()
    history = await read_history(source)
    start, stop = check_range(history, start, stop)
    changed = bool(changes.overrides) or rescore
    told = Progress("replaying", history.steps if stop is None else stop, shown=progress)
    async with contextlib.AsyncExitStack() as stack:
        ended = stack.enter_context(stopped_by_ctrl_c())
        stack.enter_context(contextlib.closing(told))
        initial = initial_model_of(source, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "initial")
        phases = changes.phases(history, start, stop)
        watch = _Watch(history, start, changed, ended, told)
        if out is not None:
            watch.write_to(out / STEPS_FILE)
        pool = None
        if rescore:
            from ops.replay.rescore import reward_pool

            pool = await stack.enter_async_context(reward_pool(phases[-1].recipe, source))
        bound = phases[-1].recipe.controller.max_staleness if changes.max_staleness else None
        rebatch = Rebatcher(source, start, bound, pool)
        phases, checkpoint = await asyncio.to_thread(phases_from, source, phases, start)
        await replay_trainer(
            source,
            phases,
            initial,
            watch.on_weights,
            watch.on_step,
            ended,
            rebatch=rebatch,
            checkpoint=checkpoint,
            export=out / "model" if out is not None else None,
        )
    difference = watch.difference or (None, "", "")
    outcome = Outcome(
        run=history.run,
        start=start,
        stop=stop,
        done=watch.version,
        changes=changes.overrides,
        rescored=rescore,
        versions=watch.versions,
        first_difference=difference[0],
        expected_digest=difference[1],
        found_digest=difference[2],
        left_out=rebatch.left_out,
        seconds=time.monotonic() - began,
    )
    return outcome, watch.steps


async def check_replay(source: LogSource) -> Check:
    """I7: train all recorded steps again, from the start, and compare every version."""
    outcome, _ = await replay_log(source, Changes(), progress=True)
    check = Check(REPLAYED, outcome.versions)
    if not outcome.identical:
        check.fail(_difference(outcome))
    elif outcome.done < outcome.stop:
        raise UserError(f"The replay was stopped after step {outcome.done} of {outcome.stop}.", "Let it end, for I7.")
    return check


def phases_from(
    source: LogSource, phases: Sequence[Phase], version: int
) -> tuple[list[Phase], tuple[int, dict[str, Any]] | None]:
    """What is left of `phases` behind the newest checkpoint at or before `version`, and that checkpoint.

    Only a run's folder holds checkpoints, the newest few; without one all is left, and it begins at version 0.
    """
    from actors.trainer.checkpoint import load_newest

    checkpoint = None
    if version > 0 and isinstance(source, RunLog):
        checkpoint = load_newest(source.folder / "checkpoints", at_most=version)
    if checkpoint is None:
        return list(phases), None
    left = [replace(phase, start=max(phase.start, checkpoint[0])) for phase in phases if phase.stop > checkpoint[0]]
    return left or [replace(phases[-1], start=checkpoint[0])], checkpoint


def _claim(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UserError(f"{out} is not empty.", NEW_FOLDER)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}.", "Give another place with --out.") from None


def _tell_comparison(outcome: Outcome, steps: list[ComparedStep], out: Path | None, console: Console) -> None:
    said = ", ".join([*outcome.changes, *(["rewards scored again"] if outcome.rescored else [])])
    console.print(f"[bold]{outcome.run}[/], steps {outcome.start} to {outcome.done}, with {said}\n")
    print_comparison(steps, console)
    console.print(f"\n{CAVEAT}", style="dim")
    if outcome.left_out:
        console.print(f"{outcome.left_out} samples have no verdict by the new reward and were left out.")
    if largest_difference(steps) is None:
        console.print("Both curves are the same: the change makes no difference to these data.")
    if out is not None:
        plot_comparison(steps, f"{outcome.run}: recorded, and replayed with {said}", out / PLOT_FILE)
        console.print(f"plot: {out / PLOT_FILE}, model: {out / 'model'}", markup=False, soft_wrap=True)


def _tell(outcome: Outcome, console: Console, changed: bool) -> None:
    if not outcome.identical:
        console.print(_difference(outcome), style="red", soft_wrap=True)
        console.print(_cause(outcome), soft_wrap=True)
        return
    if outcome.done < outcome.stop:
        console.print(f"stopped after step {outcome.done} of {outcome.stop}", style="yellow")
    if not changed or outcome.start:
        made = outcome.versions - 1
        first = (outcome.start if changed else outcome.done) - made
        console.print(
            f"{outcome.run}: weights bit-identical at every version ({made} of {made}), trained again from version "
            f"{first}, in {outcome.seconds:.1f} s",
            soft_wrap=True,
        )


def _difference(outcome: Outcome) -> str:
    return (
        f"version {outcome.first_difference} differs: {outcome.found_digest[:15]}… was computed, "
        f"{outcome.expected_digest[:15]}… is recorded; the versions after it follow from it and were not compared"
    )


def _cause(outcome: Outcome) -> str:
    if outcome.versions == 1:
        return "It is the very first version: the model is not the one that the run began with."
    return (
        "The same log and the same start must give the same weights on one kind of CPU, in float32 and with the same "
        "number of threads; those of a trainer of several ranks differ by rounding. So "
        "an entry was changed, or another version of torch or another CPU is at work here."
    )
