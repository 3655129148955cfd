"""`rollstream export`: a version of a run as a Hugging Face folder, from its checkpoint or its published weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bus.table import EVALUATIONS, WEIGHTS
from bus.weights import WeightsError
from ops.folders import NEW_FOLDER, find_folder
from ops.host import initial_model
from ops.log_source import LogSource, open_log
from ops.recipe import Recipe
from ops.weights import kept_weights
from schemas import Evaluation, MalformedMessage, UserError, WeightVersion

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

BEST, LAST = "best", "last"
SHOWN_MAX = 8


async def main(target: str | None, wanted: str, out: Path) -> int:
    """Write a version of a run into the new folder `out` and tell which; 0. Raises `UserError`."""
    folder = find_folder(target)
    async with open_log(str(folder)) as source:
        print(await export_version(source, folder, wanted, out))
    return 0


async def export_version(source: LogSource, folder: Path, wanted: str, out: Path) -> str:
    """Write the version `wanted` ("best", "last" or a number) of the run in `folder` into `out`; tells which it was.

    Raises:
        UserError: there is no such version, its bytes are not kept any more, or `out` is in use.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already.", NEW_FOLDER)
    run = await Kept.of(source, folder)
    scores = await _scores(source)
    candidates = _candidates(wanted, run, scores)
    for version in candidates:
        model = await run.load(version)
        if model is not None:
            from ops.trained_model import write_model

            out.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(write_model, *model, initial_model(folder), out)
            return _told(version, candidates[0], scores, out)
    kept = [str(version) for version in sorted(run.checkpoints | run.published, reverse=True)]
    raise UserError(
        f"Of run {source.run}, version {', '.join(map(str, candidates[:SHOWN_MAX]))} is not kept any more.",
        f"Kept are {', '.join(kept[:SHOWN_MAX])}{' and older ones' if len(kept) > SHOWN_MAX else ''}. "
        "trainer.keep_every keeps more.",
    )


class Kept:
    """What is left of a run's versions: `checkpoints` and `published` are versions whose files are there."""

    def __init__(self, recipe: Recipe, folder: Path, events: Mapping[int, WeightVersion]) -> None:
        from actors.trainer.checkpoint import steps
        from ops.host import weights_folder

        self.events = events
        self.checkpoints = steps(folder / "checkpoints")
        self.published = {
            version for version, event in events.items() if (weights_folder(folder) / event.path).is_file()
        }
        self._recipe = recipe
        self._folder = folder

    @classmethod
    async def of(cls, source: LogSource, folder: Path) -> Kept:
        """By the log of the run in `folder`. Raises `UserError` if it has no version yet."""
        events: dict[int, WeightVersion] = {}
        async for entry in source.read(WEIGHTS):
            with contextlib.suppress(MalformedMessage):
                event = entry.message()
                assert isinstance(event, WeightVersion)
                events[event.version] = event
        if not events:
            raise UserError(f"Run {source.run} has no weights yet.", "Wait until its trainer has begun.")
        return cls(Recipe.from_yaml(source.recipe_yaml), folder, events)

    async def load(self, version: int) -> tuple[PreTrainedModel, Mapping[str, Tensor]] | None:
        """A model and the weights of `version` for it: in float32 if its checkpoint is kept, else as published.

        None if neither is kept.
        """
        if version in self.checkpoints:
            from_checkpoint = await asyncio.to_thread(self._of_checkpoint, version)
            if from_checkpoint is not None:
                return from_checkpoint
        return await self._as_published(version)

    def _of_checkpoint(self, version: int) -> tuple[PreTrainedModel, Mapping[str, Tensor]] | None:
        import torch

        from actors.trainer.checkpoint import load
        from ops.trained_model import load_learner

        state = load(self._folder / "checkpoints", version)
        if state is None:
            return None
        learner = load_learner(self._recipe, initial_model(self._folder))
        learner.load_state_dict(state["learner"])
        return learner.model, learner.weights(torch.float32)

    async def _as_published(self, version: int) -> tuple[PreTrainedModel, Mapping[str, Tensor]] | None:
        from bus.weights.tensors import load_whole
        from ops.trained_model import load_learner

        event = self.events.get(version)
        if event is None:
            return None
        with contextlib.closing(kept_weights(self._folder, self.events)) as reader:
            try:
                local = await reader.fetch(event)
            except (KeyError, WeightsError):
                return None
            weights = await asyncio.to_thread(load_whole, local.path, local.base)
        plain = self._recipe.trainer.model_copy(update={"lora": None, "critic": None})
        recipe = self._recipe.model_copy(update={"trainer": plain})
        learner = await asyncio.to_thread(load_learner, recipe, initial_model(self._folder))
        return learner.model, weights


def _candidates(wanted: str, run: Kept, scores: Mapping[int, float]) -> list[int]:
    """The versions that are meant, the first choice first. Raises `UserError`."""
    newest = max(run.events)
    if wanted == LAST:
        return [newest]
    if wanted == BEST:
        if not scores:
            raise UserError(
                "No version of this run was evaluated.",
                "Name a version by its number, or set evaluation.count and evaluation.every in the next run.",
            )
        return sorted(scores, key=lambda version: (-scores[version], version))
    if not wanted.isdecimal() or int(wanted) > newest:
        raise UserError(f"There is no version {wanted}.", f"Write best, last, or a number from 0 to {newest}.")
    return [int(wanted)]


async def _scores(source: LogSource) -> dict[int, float]:
    """Mean rewards by version, on the held-out problems of the newest evaluation."""
    found: dict[str, dict[int, float]] = {}
    data = ""
    async for entry in source.read(EVALUATIONS):
        with contextlib.suppress(MalformedMessage):
            message = entry.message()
            assert isinstance(message, Evaluation)
            data = message.data
            if message.reward is not None:
                found.setdefault(data, {})[message.version] = message.reward
    return found.get(data, {})


def _told(version: int, first_choice: int, scores: Mapping[int, float], out: Path) -> str:
    def named(version: int) -> str:
        return f"version {version}" + (f" (held-out reward {scores[version]:.3f})" if version in scores else "")

    told = f"{named(version)}: {out}"
    return told if version == first_choice else f"{named(first_choice)} is not kept any more\n{told}"
