"""Tasks of reasoning-gym as data: their verifiers score in a reward process what the controller made in another."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from actors.reward.verifiers import Setting, load_builtin
from ops.datasets import DataConfig, load_dataset
from ops.recipe import Recipe
from schemas import UserError


def rows(task: str, count: int = 3, held_out: bool = False, **options: Any) -> list[dict[str, Any]]:
    data = load_dataset(DataConfig(train=f"reasoning_gym:{task}", options=options), Path(), held_out=held_out)
    return [data.row(k) for k in range(count)]


# that of rearc compares tuples, which JSON does not have; polynomial_multiplication makes another problem of the
# same seed in another process
@pytest.mark.parametrize("task", ["chain_sum", "rearc", "polynomial_multiplication", "letter_counting", "sudoku"])
def test_the_tasks_own_answer_earns_1_and_none_nothing(task: str) -> None:
    reward = load_builtin("reasoning_gym", {}, Setting())
    for row in rows(task):
        assert reward(response=f" {row['answer']}\n", task=row) == {"reward": 1.0, "unreadable": 0.0}
        assert reward(response="  ", task=row)["reward"] == 0.0
        assert reward(response="no", task=row)["reward"] < 0.1


def test_the_answer_may_stand_between_tags() -> None:
    """As the package's own prompts ask for it."""
    (row,) = rows("chain_sum", 1)
    reward = load_builtin("reasoning_gym", {"extract": "tag"}, Setting())
    assert reward(response=f"I think <answer>{row['answer']}</answer>", task=row)["reward"] == 1.0
    assert reward(response=row["answer"], task=row)["reward"] == 0.0


def test_draws_are_made_by_number_and_held_out_ones_are_others() -> None:
    first = rows("chain_sum", 5)
    assert rows("chain_sum", 5) == first
    assert len({row["prompt"] for row in first} | {row["prompt"] for row in rows("chain_sum", 5, held_out=True)}) == 10


def test_options_go_to_the_task() -> None:
    (row,) = rows("chain_sum", 1, min_terms=6, max_terms=6)
    assert len([part for part in row["prompt"].split() if part in "+-"]) == 5


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        ("chain_sun", {}, "has no task 'chain_sun'"),
        ("chain_sum", {"terms": 3}, "does not take data.options"),
        ("chain_sum", {"min_terms": 0}, "does not take data.options"),
        ("chain_sum", {"seed": 3}, "sets seed or size"),
    ],
)
def test_a_task_or_option_that_there_is_not_is_told(task: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as told:
        rows(task, **options)
    assert told.value.remedy
    if task == "chain_sun":
        assert "chain_sum" in told.value.remedy


def test_a_verifier_that_fails_on_an_answer_says_so_and_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would be tried again, and the sample be dropped: answers that break the verifier would cost nothing."""
    (row,) = rows("chain_sum", 1)

    def fails(answer: str, entry: dict[str, Any]) -> float:
        raise IndexError(answer)

    monkeypatch.setattr("reasoning_gym.get_score_answer_fn", lambda name: fails)
    reward = load_builtin("reasoning_gym", {}, Setting())
    assert reward(response="5", task=row) == {"reward": 0.0, "unreadable": 1.0}


@pytest.mark.parametrize(
    ("data", "function"),
    [
        ("{train: 'reasoning_gym:chain_sum'}", "reasoning_gym"),
        ("{train: a.jsonl, eval: b.jsonl, format: gsm8k}", "numeric"),
        ("{train: a.jsonl, eval: b.jsonl, format: livecodebench}", "code"),
        ("{train: a.jsonl, eval: b.jsonl}", "exact"),
    ],
)
def test_a_recipe_without_a_reward_function_gets_the_one_that_fits_its_data(data: str, function: str) -> None:
    """What is left out should be what is right; what is said stays."""
    text = f"name: a\nsteps: 1\nmodel: {{path: m}}\ndata: {data}\n"
    assert Recipe.from_yaml(text).reward.function == function
    assert Recipe.from_yaml(text + "reward: {timeout_s: 3}\n").reward.function == function
    assert Recipe.from_yaml(text + "reward: {function: 'my.py:reward'}\n").reward.function == "my.py:reward"
