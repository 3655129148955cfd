"""Options reach the reward function, and a mistyped one is told before anything is scored wrongly because of it."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from actors.reward.verdict import RewardRequest, Verdict
from schemas import UserError

FUNCTION = "rewards.py:reward"


async def verdict(base: Path, function: str, options: dict[str, Any], response: str = "5") -> Verdict:
    pool = RewardPool(RewardConfig(function=function, options=options, children=1), base)
    try:
        await pool.start()
        return await pool.score(RewardRequest("s", "p", response, "stop", {"answer": "5"}))
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        ("exact", {"ignore_cse": True}, "has no option ignore_cse => Did you mean ignore_case?"),
        ("exact", {"ignore_case": 1}, "ignore_case of the reward function 'exact' is 1 => It must be true or false."),
        ("exact", {"extract": "box"}, "is 'box' => It must be whole or boxed or last_number"),
        ("numeric", {"units": {"km": "a lot"}}, "=> It must be a map to a number."),
        ("numeric", {"tolerance_absolute": -1}, "tolerance_absolute is -1 => It must be a number from 0 on."),
    ],
)
def test_a_wrong_option_of_a_built_in_function_is_refused_with_the_recipe(
    function: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        RewardConfig(function=function, options=options)
    assert says in str(caught.value)


async def test_an_option_changes_what_a_built_in_function_does(tmp_path: Path) -> None:
    assert (await verdict(tmp_path, "numeric", {}, "5.4")).reward == 0.0
    assert (await verdict(tmp_path, "numeric", {"tolerance_absolute": 0.5}, "5.4")).reward == 1.0


@pytest.mark.parametrize("parameters", ["response, weight", "response, weight=0.1", "response, **options"])
async def test_options_are_keyword_arguments_of_a_users_function(tmp_path: Path, parameters: str) -> None:
    body = "options['weight']" if "**" in parameters else "weight"
    (tmp_path / "rewards.py").write_text(f"def reward({parameters}): return {body} * float(response)")
    assert (await verdict(tmp_path, FUNCTION, {"weight": 0.5})).reward == 2.5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"wieght": 0.5}, ["does not take the option wieght", "Did you mean weight?"]),
        ({"task": {}}, ["does not take the option task", "What rewards are given is no option"]),
        ({}, ["wants 'weight', which rewards are not given"]),
    ],
)
async def test_an_option_that_a_users_function_does_not_take_is_known_at_start(
    tmp_path: Path, options: dict[str, Any], says: list[str]
) -> None:
    (tmp_path / "rewards.py").write_text("def reward(response, task, weight): return weight")
    with pytest.raises(UserError) as caught:
        await verdict(tmp_path, FUNCTION, options)
    assert all(part in str(caught.value) for part in says), str(caught.value)
