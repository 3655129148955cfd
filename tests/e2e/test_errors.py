"""What a user does wrong is told in a sentence with its remedy, and costs nothing that was generated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Launched, assert_sound, audited

pytestmark = pytest.mark.e2e


def test_a_reward_that_raises_stops_the_run_and_mended_it_goes_on(
    recipe: Path, launch: Callable[..., Launched]
) -> None:
    """The samples are kept and scored then: none is lost, none gets a silent 0."""
    task = recipe.with_name("task.py")
    sound = task.read_text()
    task.write_text(sound.replace("words = response.split()", "words = response.split(None, task['typo'])"))
    run = launch("steps=3")
    assert run.ends() == 2, run.output
    assert "error: The reward function task.py:reward raised KeyError" in run.output
    assert "--resume" in run.output
    stopped = audited(run.folder)
    assert stopped.clean, stopped.to_json()
    assert stopped.report.totals["open"] == stopped.report.totals["admitted"] > 0

    task.write_text(sound)
    resumed = launch("steps=3", resume=True)
    assert resumed.ends() == 0, resumed.output
    audit = assert_sound(run.folder, 3)
    assert not {name for name in audit.report.totals if name.startswith("dropped: ") and "run_ended" not in name}


def test_a_server_that_cannot_be_reached_is_told_at_once(launch: Callable[..., Launched]) -> None:
    """Not a traceback, and not a silence of minutes."""
    run = launch(options=("--nats", "nats://127.0.0.1:9"))
    assert run.ends() == 2
    assert "error: " in run.output
    assert "127.0.0.1:9" in run.output
    assert "Traceback" not in run.output


def test_an_unknown_key_is_told_with_the_key_that_was_meant(launch: Callable[..., Launched]) -> None:
    """Before anything is started."""
    run = launch("trainer.learning_rte=1e-4", "controller.max_stalness=1")
    assert run.ends() == 2
    assert "max_staleness" in run.output
    assert "Traceback" not in run.output
    assert not (run.folder / "recipe.yaml").exists()
