"""Episodes of several turns as a user runs them: they learn, and no kill in their midst loses or garbles one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bus.table import ANSWERS, BATCHES, ROLLOUTS
from schemas import Answer, Batch, Rollout
from tests.e2e.harness import ROOT, Launched, assert_sound, read_all

pytestmark = pytest.mark.e2e


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """`start("tool", "steps=5")` runs a recipe of ours."""
    started: list[Launched] = []

    def run(recipe: str, *overrides: str) -> Launched:
        folder = tmp_path / "run"
        path = ROOT / "recipes" / f"{recipe}.yaml"
        arguments = ["run", str(path), *overrides, "bus.ack_wait_s=2.0", "--dir", str(folder), "--plain"]
        started.append(Launched(arguments, folder))
        return started[-1]

    yield run
    for launched in started:
        launched.destroy()


def rewards_of(batches: list[Batch]) -> list[float]:
    return [batch.seen["reward"] for batch in batches]


def assert_whole(rollouts: list[Rollout], answers: list[Answer]) -> None:
    """What the model made in each rollout is what its answers hold, one after the other."""
    by_id = {answer.id: answer for answer in answers}
    assert rollouts
    for rollout in rollouts:
        made = np.ones(len(rollout.tokens), np.bool_)
        for start, count in rollout.observations.reshape(-1, 2).tolist():
            made[start : start + count] = False
            assert not rollout.logprobs[start : start + count].any()
        said = [by_id[turn] for turn in rollout.turns]
        np.testing.assert_array_equal(rollout.tokens[made], np.concatenate([answer.tokens for answer in said]))
        np.testing.assert_array_equal(rollout.logprobs[made], np.concatenate([answer.logprobs for answer in said]))


def test_tries_with_feedback_learn_through_kills_of_episode_and_rollout_workers(start: Callable[..., Launched]) -> None:
    """Their episodes are run again on the answers that the log has, and go on where they were."""
    steps = 14
    run = start("multiturn", f"steps={steps}", "sft.steps=250", "rollout.partial_every=1", "controller.max_staleness=2")
    run.until_step(3)
    for victim in ("episode-0", "rollout-0"):
        killed = run.kill(victim)
        run.until_replaced(victim, killed)
        run.until_step(run.steps_trained + 2)
    assert run.ends() == 0, run.output
    assert_sound(run.folder, steps)
    batches, rollouts, answers = read_all(run.folder, BATCHES, ROLLOUTS, ANSWERS)
    rewards = rewards_of(batches)  # type: ignore[arg-type]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    assert_whole(rollouts, answers)  # type: ignore[arg-type]
    resumed = run.events("episode-0", "episode_resumed")
    assert resumed
    assert any(event["turns_reused"] for event in resumed)
    assert not run.events("episode-0", "episode_restarted")  # the same answers lead to the same questions


def test_the_use_of_a_tool_is_learnt(start: Callable[..., Launched]) -> None:
    steps = 10
    run = start("tool", f"steps={steps}", "sft.steps=400", "controller.batch_groups=8")
    assert run.ends() == 0, run.output
    assert_sound(run.folder, steps)
    batches, rollouts, answers = read_all(run.folder, BATCHES, ROLLOUTS, ANSWERS)
    rewards = rewards_of(batches)  # type: ignore[arg-type]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    assert_whole(rollouts, answers)  # type: ignore[arg-type]
    calls = [rollout for rollout in rollouts if isinstance(rollout, Rollout) and len(rollout.observations)]
    assert calls
    assert all(rollout.messages[1]["role"] == "tool" for rollout in calls)
