"""The recipe for programs: its rows are right, its demonstrations are what they claim, its model can say them."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import yaml

from actors.reward.code import CodeReward, Options, load
from actors.reward.verifiers import Setting
from actors.reward.verifiers.options import read_options

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_code", RECIPES / "code.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe_code"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    given: dict[str, Any] = yaml.safe_load((RECIPES / "code.yaml").read_text())["reward"]["options"]
    with contextlib.closing(load(read_options(Options, given, "code"), Setting())) as function:
        yield function


def test_a_calculator_works_from_left_to_right(recipe: ModuleType) -> None:
    assert recipe.result(["a", "+", "b", "*", "c", "-", "2"], [1, 2, 3, 9]) == 7
    assert recipe.program(["a", "+", "b", "*", "2"], True) == "def solve(a,b,c,d): return ( a + b ) * 2"
    assert recipe.program(["a", "+", "b", "*", "2"], False) == "def solve(a,b,c,d): return a + b * 2"


def test_programs_with_parentheses_pass_and_without_fail_where_it_matters(
    recipe: ModuleType, reward: CodeReward
) -> None:
    """By the recipe's own options, in the sandbox: or nothing could be learnt, or nothing were left to learn."""
    rng = Random(0)
    bare = []
    for _ in range(12):
        task = recipe.problem(rng)
        pressed = task["prompt"].removesuffix(" =").split()
        assert reward(recipe.program(pressed, True), task)["reward"] == 1.0
        bare.append(reward(recipe.program(pressed, False), task)["reward"])
    assert 0 < sum(bare) < len(bare)


def test_every_word_of_a_demonstration_is_a_token(recipe: ModuleType) -> None:
    rng = Random(1)
    for step in range(200):
        prompt, reply = recipe.demonstration(rng, step / 200)
        assert {*prompt.split(), *reply.split()} <= set(recipe.WORDS)
        assert len(reply.split()) < 40, "max_new_tokens of the recipe"
