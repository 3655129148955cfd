"""What is wrong with the user's own files is said before a minute is spent on a warm start."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

from actors.trainer.sections import INITIAL, LORA_REMEDY
from ops.host import EXIT_USER_ERROR, ProcessSpec
from ops.recipe import Recipe
from schemas import UserError


def check_files(recipe: Recipe) -> None:
    """Draw a row of the data, held-out data too, load all functions that the recipe names, and look for the reference,
    peft and vLLM.

    Raises `UserError`.
    """
    from actors.episode.builtin import load_episode
    from actors.episode.endpoint.episode import check_agent
    from actors.functions import load_function
    from actors.reward.pool import RewardPool
    from actors.rollout.vllm_versions import check_installed
    from ops.datasets import check_reward, load_dataset
    from ops.models import find_model

    for held_out in (False, True) if recipe.data.eval is not None else (False,):
        # all of it is looked through when the model's tokenizer is there, before the warm start
        data = load_dataset(recipe.data, recipe.base, seed=recipe.seed, held_out=held_out, most=1)
        check_reward(recipe.reward.function, data.row(0), data.format)

    if recipe.trainer.lora is not None and importlib.util.find_spec("peft") is None:
        raise UserError(
            "trainer.lora needs the package peft, which is not installed here.",
            LORA_REMEDY,
        )
    if recipe.trainer.reference not in (None, INITIAL):
        find_model(str(recipe.trainer.reference), recipe.base, "trainer.reference")  # a model of the hub is there then
    if recipe.rollout.engine == "vllm":
        check_installed()
    predicate = recipe.rollout.stop_early.predicate if recipe.rollout.stop_early is not None else None
    if predicate is not None:
        load_function(predicate, recipe.base)
    if recipe.episode is not None and recipe.episode.has_agent:
        check_agent(recipe.episode, recipe.base)
    elif recipe.episode is not None:
        load_episode(recipe.episode, recipe.reward, recipe.base)
    for named in (recipe.trainer.loss, recipe.trainer.advantage.function):
        if named is not None and ":" in named:
            load_function(named, recipe.base)

    async def load_reward() -> None:
        pool = RewardPool(recipe.reward, recipe.base)
        await pool.start()
        await pool.close()

    asyncio.run(load_reward())


def main(recipe_yaml: str, folder: Path) -> None:
    """`check_files` as the whole of a process: user code has no business in the launcher. Exits with 2 if it fails."""
    try:
        check_files(Recipe.from_yaml(recipe_yaml))
    except UserError as error:
        ProcessSpec((("controller", "precheck"),), "", "", folder, recipe_yaml).leave(error)
        sys.exit(EXIT_USER_ERROR)
