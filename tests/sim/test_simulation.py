"""Production actors under drawn faults must keep every promise; a seed must repeat exactly, or a failure is lost."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from ops.sim.command import read_regressions
from ops.sim.repeat import digest_of, digests
from ops.sim.run import Outcome, simulate
from ops.sim.scenario import FAULTS, Scenario, draw, kind_of

SEEDS = range(40)
REGRESSIONS = read_regressions(Path(__file__).with_name("regressions.txt"))


@cache
def outcome_of(seed: int) -> Outcome:
    return simulate(draw(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_keeps_every_promise(seed: int) -> None:
    outcome = outcome_of(seed)
    assert outcome.clean, f"{outcome.violations[0]}\nrollstream sim --seed {seed} --trace"


@pytest.mark.parametrize("scenario", REGRESSIONS, ids=lambda scenario: f"seed {scenario.seed}")
def test_what_was_mended_stays_mended(scenario: Scenario) -> None:
    outcome = simulate(scenario)
    assert outcome.clean, f"{outcome.violations[0]}\nrollstream sim --scenario '{scenario.to_json()}' --trace"


def test_the_seeds_are_not_idle() -> None:
    """A simulation in which nothing happens keeps every promise."""
    reached = Counter(situation for seed in SEEDS for situation in outcome_of(seed).situations)
    for situation in (
        "a batch was trained again",
        "a checkpoint was loaded",
        "a message was given out again",
        "a partial answer was continued by another worker",
        "a stopped process had a successor",
        "a token as old as the bound allows",
        "an answer ended at a string",
        "an answer of several versions",
        "an episode of several sequences",
        "an episode was cut at its bounds",
        "an episode was told of tokens while they were made",
        "an episode went on from answers in the log",
        "an episode with observations",
        "dropped: stale",
        "dropped: zero_variance",
        "fenced: prompts",
        "fenced: weights",
        "the run was drained and resumed",
    ):
        assert reached[situation], situation
    struck = {kind_of(name) for seed in SEEDS for name in outcome_of(seed).struck}
    assert struck == set(FAULTS)


def test_a_seed_repeats_exactly_whatever_ran_before_it() -> None:
    for seed in (3, 4):
        assert simulate(draw(seed)).trace_hash == outcome_of(seed).trace_hash


def test_seeds_repeat_in_other_processes_with_other_hashes() -> None:
    """Sets are ordered by hashes and addresses: where that order had an effect, traces would differ."""
    assert set(digests(5, 3).values()) == {digest_of(5, 3)}


def test_a_run_with_all_faults_that_struck_is_the_same_run() -> None:
    """Shrinking begins there."""
    busy = max(SEEDS, key=lambda seed: len(outcome_of(seed).struck))
    whole = outcome_of(busy)
    again = simulate(dataclasses.replace(whole.scenario, only=whole.struck))
    assert again.trace_hash == whole.trace_hash
    without = simulate(dataclasses.replace(whole.scenario, only=()))
    assert without.struck == ()
    assert without.clean


def test_a_plain_run_meets_no_fault_and_ends_at_its_last_step() -> None:
    outcome = simulate(Scenario(1), keep_trace=True)
    assert outcome.clean
    assert outcome.struck == ()
    assert sum("stored batches" in line for line in outcome.trace) == Scenario(1).steps
