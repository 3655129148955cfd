"""A run's evaluations as the log has them, and the versions that are evaluated while nothing else is at work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from bus.port import Bus
from bus.reading import read_to_end
from bus.table import EVALUATIONS, WEIGHTS
from ops.evaluate import eval_set, in_words, main
from ops.host import ProcessSpec
from ops.recipe import Recipe
from ops.supervise import last_words_in, run_once
from ops.view import RunView
from schemas import Evaluation, UserError, WeightVersion

if TYPE_CHECKING:
    from ops.launch import Where

log = structlog.get_logger()


async def read_evaluations(bus: Bus, data: str) -> dict[int, Evaluation]:
    """The evaluations on one set that are in the log now, by version, in ascending order."""
    found: dict[int, Evaluation] = {}
    async for entry in read_to_end(bus, EVALUATIONS):
        message = entry.message()
        if isinstance(message, Evaluation) and message.data == data:
            found.setdefault(message.version, message)
    return dict(sorted(found.items()))


async def ensure_evaluated(recipe: Recipe, where: Where, bus: Bus, view: RunView, *versions: int) -> None:
    """Evaluate those of `versions` that the log has no evaluation of, each in a process of its own; tell all of them.

    For the last version of the recipe stands the newest, if the run went further before. A version whose evaluation
    fails, however it does, goes without one, which is told: evaluation stops nobody.
    """
    if recipe.evaluation.count == 0:
        return
    data = eval_set(recipe)
    newest = await bus.last(WEIGHTS)
    event = newest.message() if newest else None
    for version in versions:
        if isinstance(event, WeightVersion) and version == recipe.steps:
            version = max(version, event.version)
        if version not in await read_evaluations(bus, data):
            spec = ProcessSpec((("evaluator", "evaluate"),), where.run, where.url, where.folder, recipe.to_yaml())
            output = where.folder / "logs" / "evaluate.out"
            why = f"its process ended in order and wrote none. {last_words_in(output)}"
            try:
                await run_once(main, (spec, version), spec, output)
            except UserError as error:
                why = f"{error.message} {error.remedy}"
        evaluation = (await read_evaluations(bus, data)).get(version)
        if evaluation is None:
            log.warning("evaluation_given_up", version=version, reason=why)
            print(f"version {version} has no evaluation: {why} The run goes on without it.", flush=True)
            continue
        if version not in view.evaluations:
            print(f"held-out reward of version {version}: {in_words(evaluation)}", flush=True)
        view.evaluated(evaluation)
