"""Where evaluations come from: the log first, a process for what it lacks, an evaluator where one is wanted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from bus.memory import MemoryBus, MemoryHub
from ops import evaluations, launch
from ops.evaluate import evaluate, in_words
from ops.evaluations import ensure_evaluated, read_evaluations
from ops.host import ProcessSpec
from ops.launch import Where
from ops.recipe import Recipe
from ops.view import RunView
from ops.workers import specs
from schemas import UserError
from tests.ops.sound_log import evaluation, weights

WHERE = Where(Path("/nowhere"), "a-run", "")
STEPS = 4


def recipe(**section: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "a-run", "steps": STEPS, "model": {"path": "m"}, "data": {"train": "t.py:f", "eval": "held-out"},
            "evaluation": section, "base": "/nowhere",
        }
    )  # fmt: skip


@pytest.fixture
async def bus() -> MemoryBus:
    bus = MemoryBus("a-run", MemoryHub())
    await bus.setup()
    return bus


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch, bus: MemoryBus) -> list[int]:
    """The versions for which a process was started; it writes what it should."""
    versions: list[int] = []

    async def run_once(target: Any, args: tuple[ProcessSpec, int], spec: ProcessSpec, output: Path) -> None:
        versions.append(args[1])
        await bus.publish(evaluation(args[1], reward=0.25))

    monkeypatch.setattr(evaluations, "run_once", run_once)
    return versions


def view() -> RunView:
    return RunView("a-run", STEPS, 0, 8, 0.0)


async def test_what_the_log_has_is_not_evaluated_again(
    bus: MemoryBus, evaluated: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run begins with its first version's evaluation, and tells it like a new one."""
    await bus.publish(evaluation(0, reward=0.75))
    seen = view()
    await ensure_evaluated(recipe(), WHERE, bus, seen, 0, STEPS)
    assert evaluated == [STEPS]
    assert seen.evals == [(0, 0.75), (STEPS, 0.25)]
    await ensure_evaluated(recipe(), WHERE, bus, seen, 0, STEPS)
    assert evaluated == [STEPS]
    assert capsys.readouterr().out.splitlines() == [
        "held-out reward of version 0: 0.750 (greedy, 2 problems)",
        f"held-out reward of version {STEPS}: 0.250 (greedy, 2 problems)",
    ]


async def test_the_last_version_is_the_newest_if_a_run_went_further_before(
    bus: MemoryBus, evaluated: list[int]
) -> None:
    """Resumed for fewer steps, a run exports what it has, and that is what is to be judged."""
    for version in range(STEPS + 3):
        await bus.publish(weights(version))
    await ensure_evaluated(recipe(), WHERE, bus, view(), STEPS)
    assert evaluated == [STEPS + 2]


async def test_a_version_whose_evaluation_fails_goes_without_and_the_run_goes_on(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function that ends its process ended the run with it, before the first step or after the last one."""

    async def run_once(target: Any, args: tuple[ProcessSpec, int], spec: ProcessSpec, output: Path) -> None:
        if args[1] == 0:
            raise UserError("evaluate ended with status 3.", "Its last words are in evaluate.out.")
        if args[1] == 2:
            await bus.publish(evaluation(2, reward=0.25))  # 1 ends in order, and has written nothing

    monkeypatch.setattr(evaluations, "run_once", run_once)
    seen = view()
    with capture_logs() as logs:
        await ensure_evaluated(recipe(), WHERE, bus, seen, 0, 1, 2)
    assert seen.evals == [(2, 0.25)]
    ended, wrote_none, done = capsys.readouterr().out.splitlines()
    assert ended == (
        "version 0 has no evaluation: evaluate ended with status 3. Its last words are in evaluate.out. "
        "The run goes on without it."
    )
    assert wrote_none.startswith("version 1 has no evaluation: its process ended in order and wrote none. ")
    assert done.startswith("held-out reward of version 2")
    assert [line["version"] for line in logs if line["event"] == "evaluation_given_up"] == [0, 1]


async def test_nothing_is_evaluated_without_problems(bus: MemoryBus, evaluated: list[int]) -> None:
    await ensure_evaluated(recipe(count=0), WHERE, bus, view(), 0, STEPS)
    assert evaluated == []
    with pytest.raises(UserError, match=r"evaluation\.count is 0"):
        await evaluate(recipe(count=0), "nowhere")


async def test_the_first_evaluation_of_a_version_on_the_set_counts(bus: MemoryBus) -> None:
    """Beyond the broker's window a repeated id is stored; on another set it is another evaluation."""
    other = dataclasses.replace(evaluation(2), data="another")
    for message in (other, evaluation(2, reward=0.5), evaluation(0)):
        await bus.publish(message)
    found = await read_evaluations(bus, "held-out")
    assert [(version, one.reward) for version, one in found.items()] == [(0, 0.5), (2, 0.5)]
    assert await read_evaluations(bus, "another") == {2: other}


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ({}, []),
        ({"every": 2}, ["evaluator-0"]),
        ({"every": 2, "workers": 2}, ["evaluator-0", "evaluator-1"]),
        ({"every": 2, "workers": 0}, []),
        ({"every": 2, "count": 0}, []),
    ],
)
def test_evaluators_are_started_where_they_have_something_to_do(section: dict[str, Any], names: list[str]) -> None:
    """Each in a process of its own, so that it can give way."""
    started = [spec for spec in specs(recipe(**section), WHERE) if spec.name.startswith("evaluator")]
    assert [spec.name for spec in started] == names
    assert all(spec.optional for spec in started)
    assert not any(spec.optional for spec in specs(recipe(**section), WHERE) if spec not in started)


async def test_nobody_joins_as_an_evaluator_where_none_is_wanted(bus: MemoryBus) -> None:
    """It would evaluate version 0 and then wait for the end."""
    with pytest.raises(UserError, match="evaluates only its first version and its last"):
        await launch._join("evaluator", WHERE, bus, recipe().to_yaml(), 1, None)


def test_verdicts_that_are_no_reward_are_told_in_words() -> None:
    """A mean over half of the problems must not look like one over all."""
    some = dataclasses.replace(
        evaluation(3, 0.5), count=5, verdicts={"scored": 2, "timeout": 2, "error": 1}, skipped=np.array([1, 2])
    )
    assert in_words(some) == "0.500 (greedy, 5 problems, 2 timeout, 1 error)"
    none = dataclasses.replace(some, reward=None, verdicts={"timeout": 5}, greedy=False)
    assert in_words(none) == "none scored (sampled, 5 problems, 5 timeout)"
