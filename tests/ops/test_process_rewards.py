"""Process rewards from the function to the weights: learned from, recorded, replayed to the bit, scored again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from bus.table import BATCHES, SCORED, STEPS
from ops.audit import audit_log
from ops.log_source import open_log
from ops.recipe import Recipe
from ops.replay.changes import Changes, read_changes
from ops.replay.into_trainer import replay_log
from ops.replay.rescore import rescore_log, reward_pool
from schemas import Batch, Scored, StepDone, UserError
from tests.ops.recorded_run import altered, record_altered, record_run

FUNCTION = '''
import re

def reward(response):
    """Nothing for the answer; one for each word that is a digit, and nothing for each other, where it ends."""
    words = re.finditer(r"\\S+", response)
    return {"reward": 0.0, "steps": [[word.end(), float(word[0].isdigit())] for word in words]}

def doubled(response):
    told = reward(response)
    return told | {"steps": [[end, 2 * earned] for end, earned in told["steps"]]}
'''
STEPS_TRAINED = 10


@pytest.fixture(scope="module")
def process_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of a run whose answers earn nothing, only their steps; equal rewards are filtered."""
    folder = tmp_path_factory.mktemp("process")
    function = folder / "rewards.py"
    function.write_text(FUNCTION)
    changes = (
        f"reward.function={function}:reward",
        f"steps={STEPS_TRAINED}",
        "trainer.lr=3e-3",
        "trainer.warmup_steps=0",
        "controller.filter=zero_variance",
        "controller.batch_groups=4",
        "rollout.max_new_tokens=24",
    )
    return asyncio.run(record_run(folder, *changes))


async def test_rewards_of_steps_alone_are_learned_from(process_run: Path) -> None:
    """The answers' own rewards are all 0: without the steps every group would have been filtered."""
    async with open_log(str(process_run)) as log:
        steps = [entry.message() async for entry in log.read(STEPS)]
        scored = [entry.message() async for entry in log.read(SCORED)]
        batches = [entry.message() async for entry in log.read(BATCHES)]
        assert (await audit_log(log)).clean
    shares = [
        float(message.token_rewards.sum()) / max(1, len(message.step_ends))
        for message in scored
        if isinstance(message, Scored)
    ]
    assert np.mean(shares[-64:]) > 1.4 * np.mean(shares[:64])  # 1.8 and more were seen
    told = [step.metrics for step in steps if isinstance(step, StepDone)]
    assert len(told) == STEPS_TRAINED
    assert all(metrics["reward_mean"] == 0.0 and metrics["advantage_abs"] > 0 for metrics in told)
    assert told[-1]["process_reward_mean"] > told[0]["process_reward_mean"]
    assert all(isinstance(batch, Batch) and batch.scored_seqs.any() for batch in batches)  # an empty answer has no step


async def test_a_replay_gives_the_same_weights_and_the_same_process_rewards(process_run: Path) -> None:
    async with open_log(str(process_run)) as log:
        outcome, steps = await replay_log(log, Changes())
        assert outcome.identical
        assert outcome.versions == STEPS_TRAINED + 1
        assert all(s.recorded["process_reward_mean"] == s.replayed["process_reward_mean"] for s in steps)
        recipe = Recipe.from_yaml(log.recipe_yaml)
        async with reward_pool(recipe, log) as pool:
            again = [one async for one in rescore_log(log, pool)]
    assert again
    assert not any(one.changed for one in again)


async def test_a_rescored_replay_trains_on_the_new_process_rewards(process_run: Path) -> None:
    """They are in no log: the batch must not bring back the recorded ones."""
    other = f"reward.function={process_run.parent / 'rewards.py'}:doubled"
    async with open_log(str(process_run)) as log:
        outcome, steps = await replay_log(log, read_changes([other], reward=True), 0, 2, rescore=True)
    assert outcome.rescored
    for step in steps:
        assert step.replayed["process_reward_mean"] == pytest.approx(2 * step.recorded["process_reward_mean"])


async def test_a_verdict_that_is_not_the_samples_stops_the_trainer(process_run: Path, tmp_path: Path) -> None:
    """Credit for another sample's steps would be a silent error."""
    async with open_log(str(process_run)) as log:
        broken = await altered(log)
        batch = broken.change(BATCHES, 1)
        assert isinstance(batch, Batch)
        broken.change(BATCHES, 1, scored_seqs=np.roll(batch.scored_seqs, 1))
        path = await record_altered(broken, process_run, tmp_path / "broken.rollstream")
    async with open_log(str(path)) as log:
        with pytest.raises(UserError, match="names verdict"):
            await replay_log(log, Changes())
        audit = await audit_log(log)
        assert not audit.clean


async def test_a_loss_of_whole_answers_refuses_them_when_they_arrive(process_run: Path) -> None:
    """It would average away which step earned them, and nobody would be told."""
    async with open_log(str(process_run)) as log:
        with pytest.raises(UserError, match="gspo takes the mean advantage") as told:
            await replay_log(log, read_changes(["trainer.algorithm=gspo"], reward=False))
    assert "decoupled_ppo" in told.value.remedy
