"""Held-out evaluation: generate on problems that were never trained on, score, take the mean."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

from ops.recipe import Recipe

ROUND = 4096  # problems in flight


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """The result: mean reward of `count` problems, how many had no verdict, and mean answer length in tokens."""

    reward: float
    count: int
    failed: int
    response_length: float

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


async def evaluate(recipe: Recipe, model: Path | str) -> Evaluation:
    """Score the model at `model` (a folder or hub name) on the recipe's held-out problems.

    Samples without a verdict (timeout, error) are counted in `failed` and left out of the mean.
    """
    from transformers import AutoConfig

    from actors.reward.pool import RewardPool
    from actors.reward.verdict import RewardRequest
    from actors.rollout.engine import Request, Sampling
    from actors.rollout.threaded import ThreadedEngine
    from actors.rollout.torch_engine import Decoder
    from ops.datasets import FileRows, load_dataset
    from ops.text import HfTokenizer

    path = str(model)
    spec = recipe.data.eval or recipe.data.train
    data = load_dataset(spec, recipe.base, seed=recipe.seed, shuffle=False, held_out=True)
    tokenizer = HfTokenizer(path)
    stop_ids = tokenizer.stop_token_ids(recipe.rollout.stop, AutoConfig.from_pretrained(path).eos_token_id)
    sampling = Sampling(
        max_new_tokens=recipe.rollout.max_new_tokens,
        temperature=0.0 if recipe.evaluation.greedy else recipe.rollout.temperature,
        stop_token_ids=stop_ids,
    )
    engine = ThreadedEngine(Decoder.from_pretrained(path, recipe.rollout))
    pool = RewardPool(recipe.reward, recipe.base)
    await engine.start()
    await pool.start()
    try:

        async def one(k: int) -> tuple[float | None, int]:
            row = dict(data.row(k))
            prompt = row.pop("prompt")
            tokens = tokenizer.encode_prompt(prompt)
            generation = await engine.generate(Request(f"eval-{k}", tokens, sampling, seed=k))
            assert generation.finish is not None
            text = tokenizer.decode(generation.tokens)
            verdict = await pool.score(
                RewardRequest(f"eval-{k}", prompt, text, generation.finish, row, generation.tokens)
            )
            return verdict.reward, len(generation.tokens)

        # A file ends; asked for more, it would begin again and count its first rows twice.
        count = min(recipe.evaluation.count, len(data) if isinstance(data, FileRows) else recipe.evaluation.count)
        results = []
        for first in range(0, count, ROUND):
            ks = range(first, min(first + ROUND, count))
            results.extend(await asyncio.gather(*(one(k) for k in ks)))
    finally:
        await engine.close()
        await pool.close()
    rewards = [reward for reward, _ in results if reward is not None]
    return Evaluation(
        reward=sum(rewards) / len(rewards) if rewards else 0.0,
        count=len(results),
        failed=len(results) - len(rewards),
        response_length=sum(length for _, length in results) / max(1, len(results)),
    )


def main(recipe_yaml: str, folder: Path, model: str, result: Path) -> None:
    """`evaluate` as the whole of a process; leaves its result as JSON in the file `result`."""
    import sys

    from ops.host import EXIT_USER_ERROR, ProcessSpec
    from schemas import UserError

    spec = ProcessSpec((("rollout", "evaluate"),), "", "", folder, recipe_yaml)
    try:
        outcome = asyncio.run(evaluate(Recipe.from_yaml(recipe_yaml), model))
    except UserError as error:
        spec.leave(error)
        sys.exit(EXIT_USER_ERROR)
    result.write_text(json.dumps(outcome.to_json()))
