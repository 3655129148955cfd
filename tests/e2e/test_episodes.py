"""Episodes of several turns as a user runs them: they learn, and no kill in their midst loses or garbles one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus.table import ANSWERS, BATCHES, EVALUATIONS, ROLLOUTS
from schemas import Answer, Batch, Evaluation, Rollout
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


def workers_of(run: Launched) -> set[str]:
    """Whose rollouts stand in the log."""
    (rollouts,) = read_all(run.folder, ROLLOUTS)
    return {rollout.worker for rollout in rollouts if isinstance(rollout, Rollout)}


def events_of(run: Launched, event: str) -> list[dict[str, Any]]:
    """What both episode workers have logged."""
    return [line for name in ("episode-0", "episode-1") for line in run.events(name, event)]


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
    """Their episodes are run again on the answers that the log has, and go on where they were. One that joins has its
    share within seconds, and what a killed one had."""
    steps = 20
    run = start(
        "multiturn",
        f"steps={steps}",
        "sft.steps=250",
        "rollout.partial_every=1",
        "controller.max_staleness=2",
        "evaluation.count=0",
    )
    run.until_step(1)
    scaled = Launched(["scale", str(run.folder), "episode=2"], run.folder)
    assert scaled.ends() == 0, scaled.output
    run.until("an episode of both", lambda: {"episode-0", "episode-1"} <= workers_of(run))
    while run.steps_trained < steps - 4:  # later the run may end without its victims
        run.until_replaced("episode-0", run.kill("episode-0"))
        run.until_step(run.steps_trained + 1)
        if any(event["turns_reused"] for event in events_of(run, "episode_resumed")):
            break  # it was killed between two turns, as is likely, and not certain
    run.kill("rollout-0")
    assert run.ends() == 0, run.output
    assert_sound(run.folder, steps)
    batches, rollouts, answers = read_all(run.folder, BATCHES, ROLLOUTS, ANSWERS)
    rewards = rewards_of(batches)  # type: ignore[arg-type]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    assert_whole(rollouts, answers)  # type: ignore[arg-type]
    assert any(event["turns_reused"] for event in events_of(run, "episode_resumed"))
    assert not events_of(run, "episode_restarted")  # the same answers lead to the same questions


def test_the_use_of_a_tool_is_learnt_and_found_on_held_out_problems(start: Callable[..., Launched]) -> None:
    """The evaluator beside the training calls the same tool; by single answers no problem would be solved."""
    steps = 10
    run = start(
        "tool",
        f"steps={steps}",
        "sft.steps=400",
        "controller.batch_groups=8",
        "evaluation.count=64",
        f"evaluation.every={steps}",
    )
    assert run.ends() == 0, run.output
    assert_sound(run.folder, steps)
    batches, rollouts, answers, evaluations = read_all(run.folder, BATCHES, ROLLOUTS, ANSWERS, EVALUATIONS)
    curve = {one.version: one for one in evaluations if isinstance(one, Evaluation)}
    assert all(one.verdicts == {"scored": 64} for one in curve.values())
    assert (curve[steps].reward or 0.0) > (curve[0].reward or 0.0) + 0.1, curve
    rewards = rewards_of(batches)  # type: ignore[arg-type]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    assert_whole(rollouts, answers)  # type: ignore[arg-type]
    calls = [rollout for rollout in rollouts if isinstance(rollout, Rollout) and len(rollout.observations)]
    assert calls
    assert all(rollout.messages[1]["role"] == "tool" for rollout in calls)


HARMFUL = """
import os, time

async def episode(prompt, policy):
    reply = await policy.chat().ask()
    if (prompt.group_id, prompt.index) == (3, 0):
        os._exit(3)
    if (prompt.group_id, prompt.index) == (5, 1):
        time.sleep(1000)
    return float(len(reply.text) % 2)
"""


def test_episodes_that_end_or_block_their_worker_cost_their_own_samples_only_and_are_told(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    """The worker was started again for ever, as "was stopped", and nothing told why. The evaluator ended the run."""
    task, steps = tmp_path / "task.py", 4
    task.write_text(HARMFUL)
    small = ("sft.steps=20", "controller.batch_groups=4", "controller.group_size=4", "controller.max_staleness=2")
    harm = (f"episode.function={task}:episode", "episode.options={}", "episode.held_up_s=2.0")
    held_out = ("evaluation.count=4", "evaluation.every=2")  # the fourth problem is the sample 3-0
    run = start("multiturn", f"steps={steps}", *small, *harm, *held_out)
    assert run.ends() == 0, run.output
    assert_sound(run.folder, steps)
    output = " ".join(run.output.split())
    assert "episode-0 ended with status 3 while sample 3-0 ran; it is started again" in output
    assert "sample 3-0: error: episode: its worker ended with status 3 while it ran, 3 times in a row" in output
    assert "sample 5-1: timeout: episode: it held up all other episodes for 2 s at" in output
    assert "1 error" in output
    assert "1 timeout" in output
    assert "The run goes on without it" in output
    assert f"version {steps} has no evaluation: evaluate ended with status 3." in output
    assert [event["sample"] for event in run.events("episode-0", "episode_blocks")][:1] == ["5-1"]
