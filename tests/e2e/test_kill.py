"""`kill -9` of every kind of process, each in the midst of a run, at staleness bounds from synchronous to far ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.harness import Launched, assert_sound

pytestmark = pytest.mark.e2e

STEPS = 10


@pytest.mark.parametrize(
    ("victim", "staleness"),
    [("trainer", 0), ("controller", 1), ("rollout-0", 4), ("reward-0", 16), ("nats-server", 2)],
)
def test_a_run_survives_kill_9_of(victim: str, staleness: int, launch: Callable[..., Launched]) -> None:
    """The log is the state: whoever is started again reads from it where the run stood. Nothing is lost or twice."""
    run = launch(f"steps={STEPS}", f"controller.max_staleness={staleness}")
    run.until_step(4)
    killed = run.kill(victim)
    run.until(f"another {victim}", lambda: run.pid(victim) != killed)
    assert run.ends() == 0, run.output
    audit = assert_sound(run.folder, STEPS)
    assert audit.report.totals["admitted"] >= STEPS * 16
