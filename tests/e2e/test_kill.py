"""`kill -9` of every kind of process, each in the midst of a run, at staleness bounds from synchronous to far ahead."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from random import Random

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
    steps = STEPS + staleness  # so that the run needs its victim again, however far it has gone ahead
    run = launch(f"steps={steps}", f"controller.max_staleness={staleness}")
    run.until_step(4)
    killed = run.kill(victim)
    run.until_replaced(victim, killed)
    assert run.ends() == 0, run.output
    audit = assert_sound(run.folder, steps)
    assert audit.report.totals["admitted"] >= steps * 16


def test_a_run_survives_kills_of_anybody_at_any_time(launch: Callable[..., Launched]) -> None:
    """Two at once, one while another comes back, the server in between: what single kills do not show."""
    steps, random = 16, Random(7)
    run = launch(f"steps={steps}", "rollout.workers=2", "controller.filter=zero_variance")
    names = ("trainer", "controller", "rollout-0", "rollout-1", "reward-0", "nats-server")
    run.until_step(1)
    kills = 0
    while kills < 10 and run.steps_trained < steps - 2:
        with contextlib.suppress(KeyError, ProcessLookupError, FileNotFoundError):  # it is just being started again
            run.kill(random.choice(names))
            kills += 1
        time.sleep(random.uniform(0.0, 0.8))
    assert kills >= 3
    assert run.ends() == 0, run.output
    assert_sound(run.folder, steps)
