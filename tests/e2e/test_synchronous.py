"""η = 0 is synchronous, on-policy RL: not nearly, but bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bus.table import DROPPED, ROLLOUTS, WEIGHTS
from bus.weights import WeightStore
from ops import reference
from ops.recipe import load_recipe
from schemas import Dropped, Rollout, WeightVersion
from tests.e2e.harness import Launched, assert_sound, read_all

pytestmark = pytest.mark.e2e

STEPS = 4
SYNCHRONOUS = (
    f"steps={STEPS}",
    "controller.max_staleness=0",
    "rollout.deterministic=true",
    "rollout.workers=2",
    "reward.timeout_s=100",
)
REWARDS = '''

def begun():
    """Wait: the first step is not to be over before both workers are there."""
    import pathlib
    while not pathlib.Path(__file__).with_name("begun").exists():
        time.sleep(0.05)

def even(response, task, finish):
    begun()
    return reward(response, task, finish)

def coin(response, task, finish):
    """1 or 0 by chance, so that a filter finds groups of two to drop."""
    begun()
    return float(len(response.split()) % 2)
'''


def reference_digests(recipe: Path, overrides: tuple[str, ...], initial: Path, folder: Path) -> list[str]:
    """What the weights of each version must be."""
    steps = reference.train(load_recipe(recipe, overrides), initial, WeightStore(folder))
    return [trained.weights.digest for trained in steps]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ("rollout.slots=8", "trainer.minibatches=2", "reward.function=task.py:even"),
            id="each worker has fewer slots than samples",
        ),
        pytest.param(
            ("controller.filter=zero_variance", "controller.group_size=2", "reward.function=task.py:coin"),
            id="some groups are filtered and their places filled",
        ),
    ],
)
def test_a_run_with_no_staleness_is_the_synchronous_loop(
    launch: Callable[..., Launched], recipe: Path, initial: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """Over a real bus, with two workers that share the samples by chance: the same weights after every step."""
    task = recipe.with_name("task.py")
    task.write_text(task.read_text() + REWARDS)
    run = launch(*SYNCHRONOUS, *overrides)
    run.until("both workers", lambda: all(run.events(f"rollout-{k}", "weights_loaded") for k in range(2)))
    task.with_name("begun").touch()
    assert run.ends() == 0, run.output
    assert_sound(run.folder, STEPS)
    versions, rollouts, dropped = read_all(run.folder, WEIGHTS, ROLLOUTS, DROPPED)
    assert len({rollout.worker for rollout in rollouts if isinstance(rollout, Rollout)}) == 2
    filtered = {"zero_variance"} if "controller.filter=zero_variance" in overrides else set()
    assert {drop.reason for drop in dropped if isinstance(drop, Dropped)} == filtered

    digests = [version.digest for version in versions if isinstance(version, WeightVersion)]
    assert len(set(digests)) == STEPS + 1, "a step that moves no weights proves nothing"
    assert digests == reference_digests(recipe, (*SYNCHRONOUS, *overrides), initial, tmp_path / "reference")
