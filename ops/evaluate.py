"""Held-out evaluation: of any model, of one version of a run, and the evaluator that does it beside the training."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.recipe import Recipe
from schemas import Evaluation, UserError

if TYPE_CHECKING:
    from actors.evaluator.actor import Evaluator
    from actors.evaluator.held_out import Episodes, HeldOut
    from actors.rollout.engine import Sampling
    from bus.port import Bus
    from ops.host import ProcessSpec
    from ops.text import HfTokenizer


def eval_set(recipe: Recipe) -> str:
    """The name of the evaluation set: `data.eval`, or what stands in for it."""
    return recipe.data.eval or recipe.data.train


def held_out(recipe: Recipe, model: str) -> HeldOut:
    """The recipe's held-out problems for the model at `model`, a folder or hub name. Raises `UserError`."""
    from transformers import AutoConfig

    from actors.evaluator.held_out import HeldOut, Problem
    from actors.rollout.engine import Sampling
    from ops.datasets import FileRows, load_dataset
    from ops.text import HfTokenizer

    tokenizer = HfTokenizer(model, recipe.data.template_options)
    count_tokens = tokenizer.count if recipe.data.max_prompt_tokens is not None else None
    wanted = recipe.evaluation.count
    data = load_dataset(
        recipe.data, recipe.base, seed=recipe.seed, held_out=True, count_tokens=count_tokens, most=max(1, wanted)
    )
    # A file ends; asked for more, it would begin again and count its first rows twice.
    count = min(wanted, len(data) if isinstance(data, FileRows) else wanted)
    problems = []
    for k in range(count):
        task = dict(data.row(k))
        prompt = task.pop("prompt")
        problems.append(Problem(prompt, tokenizer.encode_prompt(prompt), task))
    sampling = Sampling(
        max_new_tokens=recipe.rollout.max_new_tokens,
        temperature=0.0 if recipe.evaluation.greedy else recipe.rollout.temperature,
        stop_token_ids=tokenizer.stop_token_ids(recipe.rollout.stop, AutoConfig.from_pretrained(model).eos_token_id),
    )
    return HeldOut(eval_set(recipe), problems, sampling, tokenizer.decode, _episodes(recipe, tokenizer, sampling))


def _episodes(recipe: Recipe, tokenizer: HfTokenizer, sampling: Sampling) -> Episodes | None:
    """How held-out problems are asked if the recipe has episodes. Raises `UserError`."""
    if recipe.episode is None:
        return None
    from actors.episode.builtin import load_episode
    from actors.evaluator.episodes import Episodes

    function = load_episode(recipe.episode, recipe.reward, recipe.base)
    return Episodes(recipe.episode, function, tokenizer, sampling, tokenizer.decode)


async def evaluate(recipe: Recipe, model: str) -> Evaluation:
    """Score the model at `model` (a folder or hub name) on the recipe's held-out problems. Raises `UserError`."""
    if recipe.evaluation.count == 0:
        raise UserError("evaluation.count is 0: there is nothing to ask.", "Add evaluation.count=256, or another.")
    from actors.reward.pool import RewardPool
    from actors.rollout.threaded import ThreadedEngine
    from actors.rollout.torch_engine import Decoder

    problems = held_out(recipe, model)
    engine = ThreadedEngine(Decoder.from_pretrained(model, recipe.rollout))
    pool = RewardPool(recipe.reward, recipe.base)
    await engine.start()
    try:
        await pool.start()
        await problems.start()
        return await problems.evaluate(engine, pool, engine.version)
    finally:
        await engine.close()
        await problems.close()
        await pool.close()


def evaluator(bus: Bus, recipe: Recipe, folder: Path, name: str) -> Evaluator:
    """The evaluator of the run in `folder`, with an engine that holds version 0. Raises `UserError`."""
    from actors.evaluator.actor import Evaluator
    from actors.evaluator.pins import Pins
    from actors.reward.pool import RewardPool
    from actors.rollout.threaded import ThreadedEngine
    from actors.rollout.torch_engine import Decoder
    from ops.host import initial_model
    from ops.weights import reader_of

    path = str(initial_model(folder))
    return Evaluator(
        bus,
        recipe.evaluation,
        recipe.steps,
        held_out(recipe, path),
        ThreadedEngine(Decoder.from_pretrained(path, recipe.rollout, version=0)),
        RewardPool(recipe.reward, recipe.base),
        Pins(folder / f"pins-{name}", reader_of(bus, recipe, folder)),
        name,
    )


@contextlib.asynccontextmanager
async def _connected(spec: ProcessSpec) -> AsyncIterator[Bus]:
    from bus.jetstream import JetStreamBus

    bus = JetStreamBus(spec.run, spec.url, spec.name)
    await bus.connect()
    try:
        yield bus
    finally:
        await bus.close()


async def evaluate_version(spec: ProcessSpec, version: int) -> None:
    """Evaluate one version of a run and publish what comes of it, unless the log has it. Raises `UserError`."""
    from bus.weights import WeightsError

    recipe = Recipe.from_yaml(spec.recipe_yaml)
    async with _connected(spec) as bus:
        actor = await asyncio.to_thread(evaluator, bus, recipe, spec.folder, spec.name)
        try:
            await actor.once(version)
        except WeightsError as error:
            raise UserError(f"Version {version} cannot be evaluated: {error}.", "Continue with --resume.") from None


def main(spec: ProcessSpec, version: int) -> None:
    """`evaluate_version` as the whole of a process."""
    import sys

    from ops.host import EXIT_USER_ERROR
    from ops.logging import configure

    configure(spec.folder / "logs" / f"{spec.name}.jsonl", run=spec.run, actor=spec.name)
    spec.error_file.unlink(missing_ok=True)
    try:
        asyncio.run(evaluate_version(spec, version))
    except UserError as error:
        spec.leave(error)
        sys.exit(EXIT_USER_ERROR)


def told(evaluation: Evaluation) -> dict[str, Any]:
    """What people and programs ask of an evaluation, as plain data."""
    return {
        "reward": evaluation.reward,
        "parts": evaluation.parts,
        "count": evaluation.count,
        "verdicts": {kind: int(count) for kind, count in evaluation.verdicts.items()},
        "finished": evaluation.finished,
        "response_length": evaluation.response_length,
        "greedy": evaluation.greedy,
        "seconds": evaluation.seconds,
    }


def in_words(evaluation: Evaluation) -> str:
    """One line: `0.883 (greedy, 256 problems)`, with the problems that have no verdict."""
    how = "greedy" if evaluation.greedy else "sampled"
    reward = "none scored" if evaluation.reward is None else f"{evaluation.reward:.3f}"
    missing = {kind: int(count) for kind, count in evaluation.verdicts.items() if kind != "scored"}
    without = "".join(f", {count} {kind}" for kind, count in missing.items())
    return f"{reward} ({how}, {evaluation.count} problems{without})"
