"""Workers come and go, and controllers stand by, while a run goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from bus.table import ROLLOUTS
from schemas import Rollout
from tests.e2e.harness import Launched, assert_sound, audited, read_all

pytestmark = pytest.mark.e2e

STEPS = 20
SLOWLY = ("reward.function=task.py:slow_reward", f"steps={STEPS}")  # about a second a step, so that others can join
ACTORS = ("trainer", "controller", "rollout-0", "reward-0")


def test_a_rollout_worker_joins_and_is_killed_and_nobody_else_notices(launch: Callable[..., Launched]) -> None:
    """Elastic: one command adds throughput, losing a node loses nothing, and no other process is started again."""
    run = launch(*SLOWLY, "rollout.slots=8")
    run.until_step(1)
    pids = [run.pid(name) for name in ACTORS]
    joined = Launched(["up", "rollout", "--run", str(run.folder)], run.folder)
    try:
        run.until("the new worker's weights", lambda: bool(_events_of_others(run, "rollout", "weights_loaded")))
        loaded = run.steps_trained
        run.until_step(loaded + 2)
        live = audited(run.folder)
        assert live.clean, live.to_json()
        os.killpg(joined.process.pid, signal.SIGKILL)
    finally:
        joined.destroy()
    killed_at = run.steps_trained
    run.until_step(killed_at + 1)
    assert [run.pid(name) for name in ACTORS] == pids
    assert run.ends() == 0, run.output
    assert_sound(run.folder, STEPS)
    (rollouts,) = read_all(run.folder, ROLLOUTS)
    workers = {rollout.worker for rollout in rollouts if isinstance(rollout, Rollout)}
    assert len(workers) == 2
    assert "rollout-0" in workers


def _events_of_others(run: Launched, role: str, event: str) -> list[dict[str, Any]]:
    """What actors of a role that `up` brought have logged."""
    paths = (run.folder / "logs").glob(f"{role}-*.jsonl")
    names = [path.stem for path in paths if path.stem not in ACTORS]
    return [line for name in names for line in run.events(name, event)]


def test_a_standby_takes_over_from_a_controller_that_hangs_and_wakes_up_again(launch: Callable[..., Launched]) -> None:
    """Split brain: the old one wakes in the midst of its work and must not do any of it a second time."""
    run = launch(*SLOWLY)
    run.until_step(1)
    standby = Launched(["up", "controller", "--run", str(run.folder)], run.folder)
    try:
        run.until("a standby", lambda: "joined" in standby.output)
        hung = run.kill("controller", signal.SIGSTOP)
        run.until("the standby's lead", lambda: bool(_events_of_others(run, "controller", "controller_became_active")))
        stood_at = run.steps_trained
        run.until_step(stood_at + 2)
        os.kill(hung, signal.SIGCONT)
        assert run.ends() == 0, run.output
        assert standby.ends() == 0, standby.output
    finally:
        standby.destroy()
    assert_sound(run.folder, STEPS)
    noticed = ("controller_was_fenced", "controller_lost_its_lease")
    assert [line for event in noticed for line in run.events("controller", event)]
