"""A run that was ended, by whatever, goes on where it stood."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable

import pytest

from tests.e2e.harness import Launched, assert_sound, audited

pytestmark = pytest.mark.e2e

STEPS = 9


def test_ctrl_c_drains_and_resume_goes_on_with_the_next_step(launch: Callable[..., Launched]) -> None:
    """The step in hand ends and is saved, so that no step is computed twice."""
    run = launch(f"steps={STEPS}", "trainer.checkpoint_every=100")
    run.until_step(3)
    os.killpg(run.process.pid, signal.SIGINT)  # a terminal sends it to the whole group
    assert run.ends() == 130, run.output
    audit = audited(run.folder)
    assert audit.clean, audit.to_json()
    assert not audit.report.ended
    assert audit.report.totals["open"] > 0
    done = audit.report.totals["steps"]
    assert done == run.steps_trained < STEPS

    resumed = launch(f"steps={STEPS}", "trainer.checkpoint_every=100", resume=True)
    assert resumed.ends() == 0, resumed.output
    assert_sound(run.folder, STEPS)
    assert resumed.events("trainer", "trainer_restored")[-1]["version"] == done
    assert [line["version"] for line in resumed.events("trainer", "step_trained")] == list(range(1, STEPS + 1))


def test_a_launcher_that_is_killed_leaves_nobody_behind_and_resume_completes(launch: Callable[..., Launched]) -> None:
    """Everything ends with it, at once, and the log holds all that was acknowledged."""
    run = launch(f"steps={STEPS}")
    run.until_step(4)
    pids = [run.pid(name) for name in ("trainer", "controller", "rollout-0", "reward-0", "nats-server")]
    run.process.kill()
    run.process.wait()
    resumed = launch(f"steps={STEPS}", resume=True)
    resumed.until("a new trainer", lambda: len(resumed.events("trainer", "trainer_restored")) == 2)
    assert not [pid for pid in pids if _lives(pid)]
    assert resumed.ends() == 0, resumed.output
    assert_sound(run.folder, STEPS)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_finished_run_is_not_overwritten_and_without_its_checkpoints_trained_again_bit_by_bit(
    launch: Callable[..., Launched],
) -> None:
    """The log alone gives the same weights (I7), though the end was announced long ago; then more steps follow."""
    run = launch("steps=3")
    assert run.ends() == 0, run.output
    again = launch("steps=3")
    assert again.ends() == 2
    assert "--resume" in again.output

    model = run.folder / "model" / "model.safetensors"
    trained = model.read_bytes()
    shutil.rmtree(run.folder / "checkpoints")
    shutil.rmtree(run.folder / "model")
    replayed = launch("steps=3", resume=True)
    assert replayed.ends() == 0, replayed.output
    assert model.read_bytes() == trained
    assert_sound(run.folder, 3)

    continued = launch("steps=5", resume=True)
    assert continued.ends() == 0, continued.output
    assert_sound(run.folder, 5)
