"""The recipes with agents must stay what their comments promise: a script that knows nothing of training."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from actors.episode.endpoint.episode import check_agent
from ops.recipe import load_recipe

AGENT = Path(__file__).resolve().parents[2] / "recipes" / "agent"


@pytest.mark.parametrize("name", ["agent.yaml", "external.yaml"])
def test_a_recipe_with_agents_is_sound(name: str) -> None:
    recipe = load_recipe(AGENT / name)
    assert recipe.episode is not None
    assert recipe.episode.has_agent
    assert not recipe.episode.endpoint.task_fields  # the answer is not told
    check_agent(recipe.episode, recipe.base)


def test_the_agent_knows_nothing_of_training_and_multiplies() -> None:
    file = AGENT / "agent.py"
    code = file.read_text().partition('"""\n\n')[2]
    assert "rollstream" not in code.lower()
    spec = importlib.util.spec_from_file_location("recipe_agent", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert [module.calculator(text) for text in ("17*23", "17 * 23", "17", "", "a*b")] == ["391", "391", *["error"] * 3]
