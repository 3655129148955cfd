"""The composite: a part that fails must not count as 0, and a gate must not be paid for by the parts behind it."""

from pathlib import Path
from typing import Any

import pytest

from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from actors.reward.verdict import RewardRequest, Verdict
from actors.reward.verifiers import Setting, load_builtin
from schemas import UserError

REWARDS = """
from pathlib import Path
def half(response): return 0.5
def zero(response): return {"reward": 0, "why": 3}
def detailed(response): return {"reward": 1, "style": 0.25, "detail": "as it should be"}
def fails(response): raise ValueError("no such unit")
def nan(response): return float("nan")
def costly(response):
    (Path(__file__).parent / "asked").touch()
    return 1.0
def by_steps(response, scale=1.0): return {"reward": 1.0, "steps": [[1, 0.5 * scale], [2, -1.0 * scale]]}
def other_steps(response): return {"reward": 1.0, "steps": [[2, 1.0]]}
def by_tokens(response, tokens): return {"reward": 1.0, "token_rewards": [1.0] * len(tokens)}
def hangs(response):
    import time
    time.sleep(60)
def dies(response):
    import os
    os._exit(3)
"""


def part(function: str, **fields: Any) -> dict[str, Any]:
    return {"function": f"rewards.py:{function}" if function.isalpha() or "_" in function else function, **fields}


async def verdict(base: Path, *parts: dict[str, Any]) -> Verdict:
    (base / "rewards.py").write_text(REWARDS)
    config = RewardConfig(function="composite", options={"parts": list(parts)}, children=1, retries=0, timeout_s=1.0)
    pool = RewardPool(config, base, lambda: lambda tokens: "ab"[: len(tokens)])
    try:
        await pool.start()
        return await pool.score(RewardRequest("s", "p", "ab", "stop", {"answer": "ab"}, [1, 2]))
    finally:
        await pool.close()


async def test_the_reward_is_the_weighted_sum_and_the_parts_are_named(tmp_path: Path) -> None:
    given = await verdict(
        tmp_path,
        {"function": "exact", "weight": 2.0},
        part("half", weight=-1.0),
        part("detailed", weight=0.0, name="taste"),
    )
    assert (given.status, given.reward) == ("scored", 1.5)
    assert given.parts == {"exact": 1.0, "half": 0.5, "taste": 1.0, "taste/style": 0.25}
    assert given.detail == "taste: as it should be"


async def test_a_gate_that_gives_0_makes_the_whole_0_and_spares_what_stands_behind_it(tmp_path: Path) -> None:
    given = await verdict(tmp_path, part("half"), part("zero", gate=True), part("costly"))
    assert (given.status, given.reward, given.parts) == ("scored", 0.0, {"half": 0.5, "zero": 0.0, "zero/why": 3.0})
    assert not (tmp_path / "asked").exists()


async def test_an_open_gate_counts_as_any_other_part(tmp_path: Path) -> None:
    given = await verdict(tmp_path, part("half", gate=True, weight=0.2), part("costly"))
    assert given.reward == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("function", "status", "detail"),
    [
        ("fails", "error", "PartFailed: fails: ValueError: no such unit"),
        ("nan", "error", "PartFailed: nan: ValueError: the reward is nan, not a finite number"),
        ("dies", "error", "the reward process failed: it exited with status 3; last output: asking dies"),
        ("hangs", "timeout", "the reward function gave no answer within 1 s; last output: asking hangs"),
    ],
)
async def test_a_part_without_a_verdict_leaves_the_whole_without_one(
    tmp_path: Path, function: str, status: str, detail: str
) -> None:
    """As 0 it would teach the model that a right answer was wrong, whenever a judge is away."""
    given = await verdict(tmp_path, part("half"), part(function), part("costly"))
    assert (given.status, given.reward) == (status, None)
    assert given.detail.startswith(detail)


async def test_process_rewards_add_up_with_the_weights_of_their_parts(tmp_path: Path) -> None:
    given = await verdict(
        tmp_path, part("by_steps", options={"scale": 2.0}, weight=0.5), part("other_steps", weight=2.0)
    )
    assert given.token_rewards == (0.5, 1.0)
    assert given.step_ends == (0, 1)
    only = await verdict(tmp_path, part("by_tokens", weight=3.0), part("half"))
    assert only.token_rewards == (3.0, 3.0)


async def test_rewards_of_tokens_and_of_steps_cannot_be_added_up(tmp_path: Path) -> None:
    given = await verdict(tmp_path, part("by_steps"), part("by_tokens"))
    assert given.status == "error"
    assert "some parts reward tokens and others steps" in given.detail


async def test_composites_can_be_nested(tmp_path: Path) -> None:
    inner = {"function": "composite", "name": "style", "options": {"parts": [part("half"), part("zero")]}}
    given = await verdict(tmp_path, {"function": "exact"}, inner)
    assert given.parts == {"exact": 1.0, "style": 0.5, "style/half": 0.5, "style/zero": 0.0, "style/zero/why": 3.0}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], "parts is empty"),
        ([{"function": "exact"}, {"function": "exact"}], "the name exact of a part is taken"),
        ([{"function": "exact", "name": "steps"}], "the name steps of a part is taken"),
        ([{"function": "exact", "wieght": 1}], "'composite.parts[0]' has no option wieght. Did you mean weight?"),
        ([{"function": "exact", "options": {"ignore_cse": True}}], "Did you mean ignore_case?"),
        ([{"weight": 1}], "needs the option function"),
        ([{"function": "exact", "weight": float("inf")}], "weight is inf"),
        ([{"function": "numerc"}], "Did you mean numeric?"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(UserError) as caught:
        load_builtin("composite", {"parts": parts}, Setting())
    assert says in str(caught.value).replace(" => ", ". ")
