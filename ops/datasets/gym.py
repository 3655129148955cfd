"""Tasks of the package reasoning-gym: more than 100 generators of problems, each with a verifier of its own.

A row carries the problem as text, for the reward function `reasoning_gym`; see `actors.reward.verifiers.reasoning_gym`.
"""

import difflib
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from actors.reward.verifiers.reasoning_gym import package, packed, unpacked
from ops.datasets.bad_rows import BadRow
from ops.datasets.config import GYM
from schemas import UserError
from schemas.errors import did_you_mean

SEED_BITS = 32
_REMEDY = "Change data.options, or take another task."


def gym_row(spec: str, options: Mapping[str, Any]) -> Callable[[Random], dict[str, Any]]:
    """What makes rows of `reasoning_gym:task`. Raises `UserError` for a task or an option that there is not."""
    gym = package()
    name = spec.removeprefix(GYM)
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        raise UserError(
            f"'{spec}': reasoning-gym has no task {name!r}.",
            did_you_mean(near) if near else f"It has {', '.join(sorted(DATASETS))}.",
        )
    kept = dict(options)
    if {"seed", "size"} & set(kept):
        raise UserError(
            f"'{spec}': data.options sets seed or size.", "Leave them out: each draw has a seed of its own."
        )
    try:
        gym.create_dataset(name, seed=0, size=1, **kept)
    except Exception as error:  # each task checks its options in its own way
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"'{spec}' does not take data.options {kept}: {said}.",
            f"It takes those of {DATASETS[name][1].__name__} in reasoning-gym.",
        ) from None

    def make(rng: Random) -> dict[str, Any]:
        seed = rng.getrandbits(SEED_BITS)
        try:
            task = gym.create_dataset(name, seed=seed, size=1, **kept)
            entry = task[0]
            text = packed(entry)
        except Exception as error:  # as above
            raise BadRow(f"the problem of seed {seed} cannot be made: {error}", _REMEDY) from None
        answer = entry["answer"]
        return {
            "prompt": entry["question"],
            "reasoning_gym": name,
            "entry": text,
            "tuples": _needs_tuples(task.score_answer, entry, text),
            "answer": None if answer is None else str(answer),
        }

    return make


def _needs_tuples(score: Callable[[Any, Any], Any], entry: Mapping[str, Any], text: str) -> bool:
    """Whether the verifier wants tuples where JSON gives lists. Raises `BadRow` if with neither it gives the same."""
    wanted = score(entry["answer"], entry)
    for tuples in (False, True):
        try:
            if score(entry["answer"], unpacked(text, tuples)) == wanted:
                return tuples
        except Exception:  # a verifier that cannot read its own problem
            continue
    raise BadRow("its verifier cannot be given the problem as plain data", _REMEDY)
