"""Replay is the proof that the log is the state: the same weights bit by bit, or else the version that differs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bus.memory import MemoryBus, MemoryHub
from bus.table import BATCHES, ROLLOUTS
from ops import audit
from ops.log_source import RunLog, open_log
from ops.recipe import load_recipe
from ops.replay import into_trainer
from ops.replay.changes import Changes, read_changes, split_arguments
from ops.replay.compare import ComparedStep
from ops.replay.history import History, Phase, check_range, read_history
from ops.replay.replay_bus import ReplayBus
from schemas import Batch, Rollout, UserError, WeightVersion
from tests.ops.recorded_run import RECIPE, STEPS, altered, record_altered

ROOT = Path(__file__).parents[2]


async def replayed(
    path: Path, *overrides: str, start: int = 0, stop: int | None = None, out: Path | None = None
) -> tuple[into_trainer.Outcome, list[ComparedStep]]:
    async with open_log(str(path)) as source:
        return await into_trainer.replay_log(source, Changes(overrides), start, stop, out=out)


def test_a_recording_gives_the_same_weights_without_engine_and_reward(recorded: Path, tmp_path: Path) -> None:
    """On a machine that only has the file: nothing that generates or scores may be needed, or imported."""
    code = (
        "import sys, cli\n"
        f"sys.argv = ['rollstream', 'replay', 'trainer', {str(recorded)!r}]\n"
        "try: cli.main()\n"
        "finally: print(sorted(name for name in sys.modules if name.startswith(('actors.rollout.', 'actors.reward.'))\n"
        "    or name.partition('.')[0] in ('vllm', 'task', 'recipes')))\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told, imported = done.stdout.strip().splitlines()
    assert told.startswith(f"recorded: weights bit-identical at every version ({STEPS} of {STEPS})")
    assert imported == "['actors.reward.config', 'actors.rollout.config']"
    assert list(tmp_path.iterdir()) == []


async def test_a_replay_of_some_steps_compares_these_and_all_versions_up_to_there(recorded: Path) -> None:
    """What is before the first step is trained again in silence; a difference there would make all the rest vain."""
    outcome, steps = await replayed(recorded, start=1, stop=3)
    assert outcome.identical
    assert (outcome.done, outcome.versions) == (3, 4)
    assert [step.step for step in steps] == [1, 2]
    assert all(step.recorded_digest == step.replayed_digest for step in steps)
    assert all(step.recorded["loss"] == step.replayed["loss"] for step in steps)


async def test_a_changed_byte_in_a_rollout_names_the_version_that_it_changed(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """I7 is worth nothing if it cannot fail. A single log-probability is off."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    (entry,) = await log.get(BATCHES, [3])
    batch = entry.message()
    assert isinstance(batch, Batch)
    seq = int(batch.rollout_seqs[0])
    (entry,) = await log.get(ROLLOUTS, [seq])
    rollout = entry.message()
    assert isinstance(rollout, Rollout)
    logprobs = rollout.logprobs.copy()
    logprobs[0] = np.float32(logprobs[0]) - np.float32(0.5)
    log.change(ROLLOUTS, seq, logprobs=logprobs)
    path = await record_altered(log, recorded, tmp_path / "changed.rollstream")
    assert await into_trainer.main(str(path), [], 0, None, None, False) == 1
    told = capsys.readouterr().out
    assert "version 3 differs" in told
    assert await audit.main(str(path), False, True) == 1
    assert "I7: version 3 differs" in capsys.readouterr().out


async def test_another_loss_gives_two_curves(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the second step on: up to there it is the recorded run, and after it another one on the same data."""
    out = tmp_path / "out"
    arguments = ["trainer.loss=ppo", "trainer.lr=3e-3"]
    assert await into_trainer.main(str(recorded), arguments, 1, None, out, False) == 0
    told = capsys.readouterr().out
    assert "trainer.loss=ppo" in told
    assert "recorded policy" in told
    assert "bit-identical at every version (1 of 1)" in told
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["recorded"]["reward_mean"] == line["replayed"]["reward_mean"] for line in lines)
    assert all(line["recorded"]["loss"] != line["replayed"]["loss"] for line in lines[1:])
    assert all(line["recorded_digest"] != line["replayed_digest"] for line in lines)
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "model" / "config.json").exists()
    assert json.loads((out / "replay.json").read_text())["changes"] == arguments


async def test_a_smaller_bound_masks_what_it_would_have_masked(recorded: Path) -> None:
    """The mask follows from segments, step and η, so that another η needs no other data."""
    outcome, steps = await replayed(recorded, "controller.max_staleness=0")
    async with open_log(str(recorded)) as source:
        for step in steps:
            (entry,) = await source.get(BATCHES, [step.step + 1])
            batch = entry.message()
            assert isinstance(batch, Batch)
            rollouts = [entry.message() for entry in await source.get(ROLLOUTS, batch.rollout_seqs.tolist())]
            old = sum(n for rollout in rollouts for version, n in rollout.segments if version < step.step)  # type: ignore[attr-defined]
            assert step.replayed["stale_masked_tokens"] == old
    assert outcome.done == STEPS
    assert sum(step.replayed["stale_masked_tokens"] for step in steps) > 0


async def test_ctrl_c_leaves_what_was_done(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replay of a long run takes hours, and the first half of two curves says a lot."""

    def interrupt(self: object, done: int) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    drawn = []
    monkeypatch.setattr("ops.progress.Progress.show", interrupt)
    monkeypatch.setattr("ops.replay.into_trainer.plot_comparison", lambda steps, *where: drawn.append(len(steps)))
    out = tmp_path / "out"
    assert await into_trainer.main(str(recorded), ["trainer.lr=1e-4"], 0, None, out, False) == 130
    done = len((out / "steps.jsonl").read_text().splitlines())
    assert done in (2, 3)  # the step in hand may just have begun
    assert drawn == [done]
    assert f"stopped after step {done} of 4" in capsys.readouterr().out


async def test_a_run_folder_gives_the_checkpoint_that_saves_the_way(recorded: Path) -> None:
    """From step 4000 on one does not want to train 4000 steps again."""
    source = RunLog(MemoryBus("x", MemoryHub()), recorded.parent, "")
    phases = [Phase(0, STEPS, load_recipe(RECIPE))]
    left, checkpoint = into_trainer.phases_from(source, phases, 3)
    assert checkpoint is not None
    assert (checkpoint[0], left[0].start, left[0].stop) == (3, 3, STEPS)
    assert into_trainer.phases_from(source, phases, 2) == (phases, None)  # the checkpoint of step 3 is behind it


def history(*starts: tuple[float, str]) -> History:
    """A run of five steps, whose versions were announced at the seconds 10, 20, ..."""
    recipes = tuple((time_s, load_recipe(RECIPE, [override])) for time_s, override in starts)
    version = WeightVersion(version=0, path="x", digest="x", nbytes=1)
    times = {v: 10.0 * v for v in range(6)}
    return History("x", 5, recipes, dict.fromkeys(range(6), version), times, {})


def test_a_resumed_run_is_replayed_with_the_recipe_of_each_step() -> None:
    """A learning rate that was changed at a resume is no difference in the weights, but part of the log."""
    phases = history((0.0, "trainer.lr=1e-3"), (12.0, "steps=9"), (35.0, "trainer.lr=1e-4")).phases(0, 5)
    assert [(phase.start, phase.stop, phase.recipe.trainer.lr) for phase in phases] == [(0, 3, 1e-3), (3, 5, 1e-4)]


def test_changes_hold_from_the_first_step_on() -> None:
    """What came before must stay the recorded run, or its weights would be others."""
    phases = Changes(("trainer.lr=5e-5",)).phases(history((0.0, "trainer.lr=1e-3")), 2, 5)
    assert [(phase.start, phase.stop, phase.recipe.trainer.lr) for phase in phases] == [(0, 2, 1e-3), (2, 5, 5e-5)]


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (3, 3), (-1, 2), (5, None)])
def test_steps_that_are_not_in_the_log_are_refused(start: int, stop: int | None) -> None:
    with pytest.raises(UserError, match="has the steps 0 to 4"):
        check_range(history((0.0, "steps=9")), start, stop)


@pytest.mark.parametrize(
    "override", ["controller.batch_groups=3", "rollout.temperature=0.5", "steps=3", "model.path=x"]
)
def test_what_recorded_data_cannot_answer_is_refused(override: str) -> None:
    """Silence would let a person believe in a curve that the change had no part in."""
    with pytest.raises(UserError, match="cannot be changed in a replay"):
        read_changes([override], reward=True)


def test_another_reward_needs_rescoring() -> None:
    with pytest.raises(UserError, match="Add --rescore"):
        read_changes(["reward.function=exact"], reward=False)
    assert read_changes(["reward.function=exact"], reward=True).overrides


def test_what_is_no_change_is_the_log(tmp_path: Path) -> None:
    assert split_arguments(["runs/x", "trainer.lr=1"]) == ("runs/x", ["trainer.lr=1"])
    assert split_arguments(["trainer.lr=1"]) == (None, ["trainer.lr=1"])
    assert split_arguments([]) == (None, [])
    assert split_arguments(["trainer.lr=1", "runs/x"]) == ("runs/x", ["trainer.lr=1"])
    (tmp_path / "lr=1").mkdir()
    assert split_arguments([f"{tmp_path}/lr=1", "trainer.lr=1"]) == (f"{tmp_path}/lr=1", ["trainer.lr=1"])
    with pytest.raises(UserError, match="two logs"):
        split_arguments(["runs/x", "trainer.lr"])


async def test_what_was_refused_leaves_no_folder(recorded: Path, tmp_path: Path) -> None:
    for target, start in ((str(recorded), 99), (str(tmp_path / "nowhere"), 0)):
        with pytest.raises(UserError):
            await into_trainer.main(target, ["trainer.lr=1"], start, None, tmp_path / "out", False)
        assert not (tmp_path / "out").exists()


async def test_a_rollout_that_is_not_in_the_log_is_told(recorded: Path) -> None:
    """A damaged recording lacks entries; a traceback would not say which steps can still be replayed."""

    async def nothing(message: object) -> None:
        pass

    async with open_log(str(recorded)) as source:
        bus = ReplayBus(source, STEPS, nothing, nothing)
        with pytest.raises(UserError, match="not in the log"):
            await bus.get(ROLLOUTS, [10_000])


async def test_an_output_folder_is_never_written_over(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UserError, match="is not empty"):
        await into_trainer.main(str(recorded), [], 0, None, tmp_path, False)


async def test_the_history_tells_what_can_be_replayed(recorded: Path) -> None:
    """A run that was killed has a batch whose weights were never announced."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    whole = await read_history(log)
    assert (whole.steps, sorted(whole.versions), sorted(whole.metrics)) == (STEPS, [0, 1, 2, 3, 4], [0, 1, 2, 3])
    log.remove_last("weights")
    assert (await read_history(log)).steps == STEPS - 1
