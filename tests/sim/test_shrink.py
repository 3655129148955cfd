"""A failing run with hundreds of faults tells nothing: shrinking must keep what breaks the promise, and only that."""

from __future__ import annotations

from collections.abc import Callable

from ops.sim.run import Outcome
from ops.sim.scenario import Scenario
from ops.sim.shrink import shrink
from ops.sim.world import Violation

ALL = tuple(f"kill:{n}" for n in range(1, 60))


def world_in_which(breaks: Callable[[Scenario, frozenset[str]], str]) -> Callable[[Scenario], Outcome]:
    """Runs that take no time: `breaks` names the promise that these faults break, '' if none."""

    def run(scenario: Scenario) -> Outcome:
        struck = tuple(name for name in ALL if scenario.only is None or name in scenario.only)
        invariant = breaks(scenario, frozenset(struck))
        violations = (Violation(invariant, "broken", 1.0),) if invariant else ()
        return Outcome(scenario, violations, "hash", ("the last line",), struck, {}, 1.0)

    return run


BIG = Scenario(1, steps=8, workers=4, trainers=2, faults={"kill": 0.1, "term": 0.2})


def test_only_the_faults_that_matter_are_left() -> None:
    run = world_in_which(lambda scenario, struck: "I3" if {"kill:7", "kill:40"} <= struck else "")
    small = shrink(run(BIG), run).scenario
    assert small.only == ("kill:7", "kill:40")
    assert (small.steps, small.workers, small.trainers) == (1, 1, 1)
    assert small.faults == {"kill": 0.1}


def test_what_the_failure_needs_stays() -> None:
    run = world_in_which(lambda scenario, struck: "I3" if scenario.workers > 1 and scenario.steps >= 3 else "")
    small = shrink(run(BIG), run).scenario
    assert (small.steps, small.workers) == (3, 2)
    assert small.only == ()


def test_another_broken_promise_is_another_failure() -> None:
    run = world_in_which(lambda scenario, struck: "I3" if "kill:7" in struck else "I8")
    assert shrink(run(BIG), run).scenario.only == ("kill:7",)


def test_shrinking_ends_with_its_time() -> None:
    run = world_in_which(lambda scenario, struck: "I3")
    failed = run(BIG)
    assert shrink(failed, run, seconds=0.0) is failed
