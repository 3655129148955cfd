"""A replay into a trainer: the production `Trainer` and `Learner`, fed with recorded batches and rollouts.

Nothing is generated and nothing is scored: neither an engine nor a reward function is needed, or imported.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from actors.trainer.config import PublishConfig
from bus.weights import WeightStore, WeightWriter
from ops.log_source import LogSource
from ops.replay.history import Phase
from ops.replay.replay_bus import OnStep, Rebatch, ReplayBus, as_recorded
from schemas import WeightVersion

if TYPE_CHECKING:
    from actors.trainer.learner import Learner
    from actors.trainer.retention import Judged

# Who compares looks at the learner at each version, and at the digest of all weights.
IN_STEP = PublishConfig(delta=False, overlap=False)

OnWeights: TypeAlias = Callable[[WeightVersion, "Learner"], Awaitable[None]]


class _Handover:
    """The checkpoint that one phase leaves to the next, in memory; see `actors.trainer.actor.CheckpointsPort`."""

    def __init__(self, newest: tuple[int, dict[str, Any]] | None) -> None:
        self.newest = newest

    def save(self, step: int, state: Mapping[str, Any], judged: Judged) -> None:
        """Keep it; its tensors are those of the learner, which the next phase continues."""
        self.newest = step, dict(state)

    def load_newest(self) -> tuple[int, dict[str, Any]] | None:
        """What was kept."""
        return self.newest

    def steps(self) -> set[int]:
        """None of them is a checkpoint of the run."""
        return set()


async def replay_trainer(
    source: LogSource,
    phases: Sequence[Phase],
    initial: Path,
    on_weights: OnWeights,
    on_step: OnStep,
    stop: asyncio.Event,
    *,
    rebatch: Rebatch = as_recorded,
    checkpoint: tuple[int, dict[str, Any]] | None = None,
    export: Path | None = None,
) -> int:
    """Train the recorded batches of `phases`, one after the other, and return the version reached.

    It begins with the model in the folder `initial` at version 0, or with `checkpoint`, as (version, state) at the
    first phase's start. `on_weights` is given every version with the learner that holds it, and `on_step` what the
    trainer tells of a step; the trainer waits for both. `stop` lets the step in hand end. With `export` the model at
    the end of the last phase is written there.

    Raises:
        UserError: the log does not hold what its batches name.
    """
    from actors.trainer.actor import Trainer
    from ops.trained_model import export_model, learner_of, load_learner, weights_of

    learner = await asyncio.to_thread(load_learner, phases[0].recipe, initial)
    handover = _Handover(checkpoint)
    newest = -1

    async def on_version(event: WeightVersion) -> None:
        nonlocal newest
        if event.version > newest:  # each phase tells the version that it begins with
            newest = event.version
            await on_weights(event, learner)

    with tempfile.TemporaryDirectory(prefix="rollstream-replay-") as aside:
        for phase in phases:
            learner = learner_of(learner.model, phase.recipe, initial)
            bus = ReplayBus(source, phase.stop, on_version, on_step, rebatch)
            trainer = Trainer(
                bus,
                phase.recipe.trainer.model_copy(update={"publish": IN_STEP}),
                phase.stop,
                learner,
                partial(weights_of, learner, phase.recipe),
                partial(export_model, learner, initial, export) if export and phase is phases[-1] else _nothing,
                WeightWriter(WeightStore(Path(aside))),
                handover,
            )
            await trainer.run(stop)
            if stop.is_set():
                break
    return newest


def _nothing() -> None:
    """Only the last phase exports its model."""
