"""Evaluation stops nobody: with two evaluators, one of them killed, a run makes the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bus.table import EVALUATIONS, WEIGHTS
from schemas import Evaluation, WeightVersion
from tests.e2e.harness import Brake, Launched, assert_sound, read_all
from tests.e2e.test_synchronous import reference_digests

pytestmark = pytest.mark.e2e

STEPS = 4
SYNCHRONOUS = (f"steps={STEPS}", "controller.max_staleness=0", "rollout.deterministic=true")
BESIDE = ("evaluation.count=16", "evaluation.every=1", "evaluation.workers=2", "evaluation.nice=0")


def test_evaluators_change_nothing_and_a_killed_one_goes_on(
    launch: Callable[..., Launched], recipe: Path, initial: Path, tmp_path: Path, brake: Brake
) -> None:
    """Every version is evaluated once or named as skipped, the first and the last are evaluated, and the run is what it
    would have been."""
    run = launch(*SYNCHRONOUS, *BESIDE, brake.override)
    run.until("an evaluation", lambda: bool(_evaluated_by(run)))
    (victim, *_) = _evaluated_by(run)
    run.until_replaced(victim, run.kill(victim))
    brake.release()
    assert run.ends() == 0, run.output
    audit = assert_sound(run.folder, STEPS)
    messages, versions = read_all(run.folder, EVALUATIONS, WEIGHTS)
    evaluations = [message for message in messages if isinstance(message, Evaluation)]
    assert audit.report.totals["evaluations"] == len(evaluations)
    done = [evaluation.version for evaluation in evaluations]
    skipped = [version for evaluation in evaluations for version in evaluation.skipped.tolist()]
    assert {0, STEPS} <= set(done)
    assert sorted([*done, *skipped]) == list(range(STEPS + 1))
    assert all(evaluation.verdicts == {"scored": 16} for evaluation in evaluations)
    assert f"held-out reward of version {STEPS}: " in run.output
    assert not list(run.folder.glob("pins-*"))

    digests = [version.digest for version in versions if isinstance(version, WeightVersion)]
    assert digests == reference_digests(recipe, (*SYNCHRONOUS, brake.override), initial, tmp_path / "reference")


def _evaluated_by(run: Launched) -> list[str]:
    """The evaluators that have evaluated something."""
    return [name for name in ("evaluator-0", "evaluator-1") if run.events(name, "version_evaluated")]


def test_without_an_evaluator_the_first_and_the_last_version_are_evaluated(
    launch: Callable[..., Launched], recipe: Path
) -> None:
    """Before the first step and after the last, by the same program and into the same log; a resumed run has them."""
    run = launch("steps=2", "evaluation.count=8")
    assert run.ends() == 0, run.output
    assert_sound(run.folder, 2)
    ((first, last),) = read_all(run.folder, EVALUATIONS)
    assert isinstance(first, Evaluation)
    assert isinstance(last, Evaluation)
    assert (first.version, last.version) == (0, 2)
    assert "evaluator-0" not in run.output
