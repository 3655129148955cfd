"""`rollstream diff`: the log-probabilities that the engine reported, against those that the trainer computes.

Each token is asked of the weights that made it: kept versions are loaded, the others trained again from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bus.table import BATCHES, ROLLOUTS, SCORED
from bus.weights import WeightsError
from bus.weights.tensors import load_whole
from ops.console import open_console, tell_damage
from ops.log_source import LogSource, RunLog, initial_model_of, open_log
from ops.mismatch import Differences, Mismatch, Offender
from ops.progress import Progress, stopped_by_ctrl_c
from ops.recipe import Recipe
from ops.replay.history import History, Phase, check_range, read_history
from ops.replay.trainer import replay_trainer
from ops.text import HfTokenizer, visible
from ops.weights import kept_weights
from schemas import Batch, MalformedMessage, Rollout, Scored, StepDone, UserError, WeightVersion
from schemas.trajectory import model_tokens

if TYPE_CHECKING:
    from actors.trainer.learner import Learner

WINDOW = 64  # rollouts held at once
ROWS_MAX = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """What two sound implementations may differ by, in nats a token: measured between vLLM and transformers."""

    dtypes: str
    mean: float
    largest: float


FLOAT32: Final = Tolerance("float32 against float32", 1e-4, 1e-4)
BFLOAT16: Final = Tolerance("bfloat16 on either side", 1e-2, 0.25)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Whether engine and trainer are the same policy, as far as their number formats allow."""

    consistent: bool
    tolerance: Tolerance
    sentence: str


def tolerance_of(recipe: Recipe) -> Tolerance:
    """By the formats of the engine's weights and of the trainer's forward pass."""
    exact = recipe.rollout.dtype == "float32" and recipe.trainer.autocast == "none"
    return FLOAT32 if exact else BFLOAT16


def judge(found: Differences, recipe: Recipe) -> Verdict:
    """Hold what was found to the tolerance."""
    tolerance = tolerance_of(recipe)
    consistent = found.mean <= tolerance.mean and found.largest <= tolerance.largest
    limits = f"mean ≤ {tolerance.mean:g}" if tolerance.mean != tolerance.largest else "each token"
    limits += f", max ≤ {tolerance.largest:g}" if tolerance.mean != tolerance.largest else f" ≤ {tolerance.largest:g}"
    sentence = f"{tolerance.dtypes}: {'consistent' if consistent else 'INCONSISTENT'} ({limits} nats)"
    if not consistent and recipe.rollout.on_update == "keep":
        sentence += "; rollout.on_update is keep, so tokens after an update were made from a cache of older weights"
    return Verdict(consistent, tolerance, sentence)


class Comparer:
    """Asks the trainer for the tokens of one version after another, in rising order."""

    def __init__(self, source: LogSource, wanted: Mapping[int, Sequence[int]], mismatch: Mismatch) -> None:
        self.mismatch = mismatch
        self._source = source
        self._wanted = wanted  # rollout sequences by version

    async def compare(self, version: int, learner: Learner) -> None:
        """All wanted tokens of `version`, with `learner` holding its weights."""
        seqs = self._wanted.get(version, ())
        for at in range(0, len(seqs), WINDOW):
            entries = await self._source.get(ROLLOUTS, seqs[at : at + WINDOW])
            rollouts = []
            for entry in entries:
                with contextlib.suppress(MalformedMessage):
                    message = entry.message()
                    if isinstance(message, Rollout):
                        rollouts.append(message)
            await asyncio.to_thread(self._compare, version, rollouts, learner)

    def _compare(self, version: int, rollouts: Sequence[Rollout], learner: Learner) -> None:
        from actors.trainer.forward import scored_sequences
        from ops.logprobs import trainer_logprobs

        masks = [_made_by(version, rollout) for rollout in rollouts]
        sequences = [
            scored_sequences(rollout.prompt_tokens, rollout.tokens, mask, rollout.sequences)
            for rollout, mask in zip(rollouts, masks, strict=True)
        ]
        found = iter(trainer_logprobs(learner, [one for of_rollout in sequences for one in of_rollout]))
        for rollout, mask, of_rollout in zip(rollouts, masks, sequences, strict=True):
            logprobs = np.concatenate([next(found) for _ in of_rollout])
            positions = np.flatnonzero(mask)
            self.mismatch.add(
                rollout.sample_id, version, rollout.tokens, positions, rollout.logprobs[positions], logprobs
            )


def _made_by(version: int, rollout: Rollout) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """bool [T]: which tokens of the answer `version` made; none of what the model was told."""
    if not rollout.segments:
        return np.zeros(0, np.bool_)
    versions, counts = np.array(rollout.segments, np.int64).T
    made: np.ndarray[Any, np.dtype[np.bool_]] = np.repeat(versions == version, counts)
    return made & model_tokens(rollout.observations, len(rollout.tokens))


async def main(
    target: str | None, start: int, stop: int | None, worst: int, as_json: bool, out: Console | None = None
) -> int:
    """Compare and tell; 0 if engine and trainer are consistent, else 1; 130 after Ctrl-C.

    Raises:
        UserError: the log cannot be read, or its weights cannot be had.
    """
    console = out or open_console()
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(open_log(target))
        initial = initial_model_of(source, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "initial")
        history = await read_history(source)
        mismatch, how, whole = await diff_log(source, history, initial, start, stop, worst)
        verdict = judge(mismatch.all, history.recipe)
        if as_json:
            print(_json(source.run, mismatch, verdict, how, whole))
        else:
            seconds = time.monotonic() - began
            _tell(source.run, mismatch, verdict, HfTokenizer(str(initial)), console, f"{how}, {seconds:.1f} s")
            tell_damage(source.damage, console)
            if not whole:
                console.print("stopped before the end: later versions were not compared", style="yellow")
    if not whole:
        return 130
    return 0 if verdict.consistent else 1


async def diff_log(
    source: LogSource, history: History, initial: Path, start: int, stop: int | None, worst: int
) -> tuple[Mismatch, str, bool]:
    """Compare the samples trained in the steps `start <= step < stop`.

    Also says where the weights came from, and whether all was compared, or Ctrl-C came before.
    """
    start, stop = check_range(history, start, stop)
    wanted = await _wanted(source, start, stop)
    if not wanted:
        raise UserError(f"The samples of steps {start} to {stop} have no tokens.", "Ask for other steps.")
    mismatch = Mismatch(tolerance_of(history.recipe).largest, worst)
    comparer = Comparer(source, wanted, mismatch)
    newest = max(wanted)
    with contextlib.closing(Progress("comparing, at version", newest)) as progress, stopped_by_ctrl_c() as stopped:
        kept = await _are_kept(source, history, sorted(wanted))
        if kept:
            await _compare_kept(source, sorted(wanted), comparer, history, initial, stopped, progress)
        else:
            await _compare_replayed(source, history, initial, min(wanted), newest, comparer, stopped, progress)
    how = "weights: the kept files" if kept else "weights: trained again from the log"
    return mismatch, how, not stopped.is_set()


async def _wanted(source: LogSource, start: int, stop: int) -> dict[int, list[int]]:
    """Sequences of the rollouts that were trained in these steps, by the versions that made tokens of them."""
    trained: set[int] = set()
    async for entry in source.read(BATCHES, start + 1, stop + 1):
        batch = entry.message()
        assert isinstance(batch, Batch)
        trained.update(batch.rollout_seqs.tolist())
    wanted: dict[int, list[int]] = defaultdict(list)
    async for entry in source.read(SCORED):
        with contextlib.suppress(MalformedMessage):
            scored = entry.message()
            if isinstance(scored, Scored) and scored.rollout_seq in trained:
                trained.discard(scored.rollout_seq)
                for version in sorted({version for version, _ in scored.segments}):
                    wanted[version].append(scored.rollout_seq)
    return dict(wanted)


async def _are_kept(source: LogSource, history: History, versions: Sequence[int]) -> bool:
    """Whether all of these versions can be had, and the engine's format is the trainer's own."""
    if not isinstance(source, RunLog) or history.recipe.rollout.dtype != "float32":
        return False
    with contextlib.closing(kept_weights(source.folder, history.versions)) as reader:
        try:
            for version in versions:
                await reader.fetch(history.versions[version])
        except (KeyError, WeightsError):
            return False
    return True


async def _compare_kept(
    source: LogSource,
    versions: Sequence[int],
    comparer: Comparer,
    history: History,
    initial: Path,
    stopped: asyncio.Event,
    progress: Progress,
) -> None:
    from ops.trained_model import load_learner

    assert isinstance(source, RunLog)
    without_adapters = history.recipe.trainer.model_copy(update={"lora": None})
    recipe = history.recipe.model_copy(update={"trainer": without_adapters})
    learner = await asyncio.to_thread(load_learner, recipe, initial)
    with contextlib.closing(kept_weights(source.folder, history.versions)) as reader:
        for version in versions:
            if stopped.is_set():
                return
            local = await reader.fetch(history.versions[version])
            learner.model.load_state_dict(await asyncio.to_thread(load_whole, local.path, local.base))
            await comparer.compare(version, learner)
            progress.show(version)


async def _compare_replayed(
    source: LogSource,
    history: History,
    initial: Path,
    oldest: int,
    newest: int,
    comparer: Comparer,
    stopped: asyncio.Event,
    progress: Progress,
) -> None:
    from ops.replay.into_trainer import phases_from

    async def on_weights(event: WeightVersion, learner: Learner) -> None:
        if event.result_digest != history.versions[event.version].result_digest:
            raise UserError(
                f"The weights of version {event.version} cannot be had: trained again from the log they differ.",
                "See `rollstream replay trainer`; or ask for steps whose versions the run's folder keeps.",
            )
        progress.show(event.version)
        await comparer.compare(event.version, learner)

    async def on_step(done: StepDone) -> None:
        pass

    phases = history.phases(0, newest) or [Phase(0, 0, history.recipe_of(0))]
    phases, checkpoint = await asyncio.to_thread(phases_from, source, phases, oldest)
    await replay_trainer(source, phases, initial, on_weights, on_step, stopped, checkpoint=checkpoint)


# ---- telling


def _json(run: str, mismatch: Mismatch, verdict: Verdict, how: str, whole: bool) -> str:
    return json.dumps(
        {
            "run": run,
            "consistent": verdict.consistent,
            "verdict": verdict.sentence,
            "tolerance": dataclasses.asdict(verdict.tolerance),
            "how": how,
            "whole": whole,
            "samples": len(mismatch.samples),
            **mismatch.all.to_dict(),
            "quantiles": {f"{share:g}": value for share, value in mismatch.quantiles().items()},
            "by_version": {version: found.to_dict() for version, found in sorted(mismatch.by_version.items())},
            "by_position": {position: found.to_dict() for position, found in sorted(mismatch.by_position.items())},
            "worst": [dataclasses.asdict(offender) for offender in mismatch.offenders],
        },
        indent=1,
    )


def _tell(run: str, mismatch: Mismatch, verdict: Verdict, tokenizer: HfTokenizer, console: Console, how: str) -> None:
    found = mismatch.all
    console.print(
        f"[bold]{run}[/]: engine against trainer, {found.tokens:,} tokens of {len(mismatch.samples):,} samples ({how})"
    )
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    facts.add_row("|Δ log-probability|", f"mean {found.mean:.2g}, max {found.largest:.2g} nats")
    told = ", ".join(f"{share:.1%} ≤ {value:.2g}" for share, value in mismatch.quantiles().items())
    facts.add_row("quantiles", told)
    facts.add_row("KL(engine ‖ trainer), k3", f"{found.k3:.2g} nats a token")
    facts.add_row(f"above {mismatch.tolerance:g}", f"{found.share_above:.4%} of the tokens")
    console.print(facts)
    _tell_parts("version", mismatch.by_version, console)
    _tell_parts("position from", mismatch.by_position, console)
    if mismatch.offenders:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for heading in ("|Δ|", "engine", "trainer", "sample", "position", "version", "the worst tokens, in place"):
            table.add_column(heading, justify="left" if heading.startswith(("sample", "the")) else "right")
        for offender in mismatch.offenders:
            table.add_row(
                f"{offender.difference:.2g}",
                f"{offender.engine:.4f}",
                f"{offender.trainer:.4f}",
                offender.sample_id,
                str(offender.position),
                str(offender.version),
                _in_place(offender, tokenizer),
            )
        console.print(table)
    console.print(verdict.sentence, style="green" if verdict.consistent else "red", soft_wrap=True)


def _tell_parts(name: str, parts: Mapping[int, Differences], console: Console) -> None:
    """The first and the last rows of a long table say enough; JSON has all."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in (name, "tokens", "mean |Δ|", "max |Δ|", "k3"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = sorted(parts.items())
    half = ROWS_MAX // 2
    shown = rows if len(rows) <= ROWS_MAX else [*rows[:half], None, *rows[-half:]]
    for row in shown:
        if row is None:
            table.add_row("…", "", "", "", "")
            continue
        at, found = row
        table.add_row(str(at), f"{found.tokens:,}", f"{found.mean:.2g}", f"{found.largest:.2g}", f"{found.k3:.2g}")
    console.print(table)


def _in_place(offender: Offender, tokenizer: HfTokenizer) -> Text:
    pieces = tokenizer.pieces((*offender.before, offender.token, *offender.after))
    at = len(offender.before)
    text = Text("…" if offender.position > at else "", no_wrap=True)
    for place, piece in enumerate(pieces):
        text.append(visible(piece), "reverse" if place == at else "dim")
    return text
