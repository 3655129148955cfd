"""The command is what people meet: a broken promise must fail it, and be left so that it can be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli import app
from ops.sim import command
from ops.sim.scenario import Scenario
from ops.sim.shrink import shrink
from schemas import UserError
from tests.sim.test_shrink import world_in_which


def test_a_failing_seed_is_shrunk_kept_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = world_in_which(lambda scenario, struck: "I3" if "kill:7" in struck else "")
    monkeypatch.setattr(command, "simulate", run)
    monkeypatch.setattr(command, "shrink", lambda failed: shrink(failed, run))
    monkeypatch.setattr(command, "digests", lambda first, count: {"0": "same", "1": "same"})
    kept = tmp_path / "regressions.txt"
    kept.touch()
    assert command.main(0, 2, 1, None, kept) == 1
    assert "BROKEN I3" in capsys.readouterr().out
    assert [scenario.only for scenario in command.read_regressions(kept)] == [("kill:7",), ("kill:7",)]


def test_seeds_that_do_not_repeat_fail_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "digests", lambda first, count: {"0": "one", "1": "other"})
    assert command.main(0, 1, 1, None, None) == 1


def test_several_processes_count_as_one_does() -> None:
    alone, two = (command.run_seeds(0, 6, jobs, None, Console(quiet=True)) for jobs in (1, 2))
    assert (alone.seeds, alone.faults, alone.situations) == (two.seeds, two.faults, two.situations)


def test_one_scenario_is_shown_event_by_event(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.replay(Scenario(1), trace=True) == 0
    shown = capsys.readouterr().out
    assert "stored batches 1 0" in shown
    assert """rollstream sim --scenario '{"seed": 1}'""" in shown


def test_a_scenario_that_breaks_a_promise_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = world_in_which(lambda scenario, struck: "I3")
    monkeypatch.setattr(command, "simulate", lambda scenario, keep_trace: run(scenario))
    assert command.replay(Scenario(1), trace=False) == 1
    assert "BROKEN I3" in capsys.readouterr().out


def test_a_missing_file_of_regressions_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no file .*kept\.txt"):
        command.main(0, 1, 1, None, tmp_path / "kept.txt")


@pytest.mark.parametrize("arguments", [["--minutes", "-1"], ["--jobs", "0"], ["--seeds", "0"]])
def test_a_run_of_nothing_is_refused(arguments: list[str]) -> None:
    """All promises kept in 0 seeds would sound like a proof."""
    assert CliRunner().invoke(app, ["sim", *arguments]).exit_code == 2
