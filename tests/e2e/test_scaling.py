"""Workers come and go, and controllers stand by, while a run goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable

import pytest

from bus.table import ROLLOUTS
from schemas import Rollout
from tests.e2e.harness import Brake, Launched, assert_sound, audited, read_all

pytestmark = pytest.mark.e2e

STEPS = 30  # enough for others to come while the run is braked
ACTORS = ("trainer", "controller", "rollout-0", "reward-0")


def test_two_rollout_workers_join_and_are_killed_and_nobody_else_notices(
    launch: Callable[..., Launched], brake: Brake
) -> None:
    """Elastic: one command adds throughput, losing a node loses nothing, and no other process is started again."""
    run = launch(brake.override, f"steps={STEPS}", "rollout.slots=8")
    run.until_step(1)
    pids = [run.pid(name) for name in ACTORS]
    joined = Launched(["up", "rollout", "--count", "2", "--run", str(run.folder)], run.folder)
    try:
        run.until("weights in both", lambda: len(_logs_of_others(run, "rollout", "weights_loaded")) == 2)
        run.until("samples of both", lambda: len(_workers(run)) == 3)
        live = audited(run.folder)
        assert live.clean, live.to_json()
        os.killpg(joined.process.pid, signal.SIGKILL)
    finally:
        joined.destroy()
    brake.release()
    killed_at = run.steps_trained
    run.until_step(killed_at + 1)
    assert [run.pid(name) for name in ACTORS] == pids
    assert run.ends() == 0, run.output
    assert_sound(run.folder, STEPS)


def test_a_run_is_scaled_where_it_runs_and_stays_so_when_it_is_resumed(
    launch: Callable[..., Launched], brake: Brake
) -> None:
    """1 -> 3 -> 2, and 2 when the launcher comes back; who leaves hands over, nobody else is started again."""
    run = launch(brake.override, f"steps={STEPS}", "rollout.slots=8")
    run.until_step(1)
    pids = [run.pid(name) for name in ACTORS]
    assert _scale(run, "rollout=3") == "rollout: 1 -> 3 on "
    run.until("samples of all", lambda: len(_workers(run)) == 3)
    assert _scale(run, "rollout=2").startswith("rollout: 3 -> 2 on ")
    run.until("one to leave", lambda: "rollout-2" not in _processes(run))
    assert _scale(run, "rollout=2") == "rollout: 2 as before on "
    assert [run.pid(name) for name in ACTORS] == pids
    run.kill_launcher()
    resumed = launch(brake.override, f"steps={STEPS}", "rollout.slots=8", resume=True)
    resumed.until("two workers", lambda: {"rollout-0", "rollout-1"} <= _processes(resumed))
    assert "rollout-2" not in _processes(resumed)
    brake.release()
    assert resumed.ends() == 0, resumed.output
    assert_sound(run.folder, STEPS)


def _scale(run: Launched, *arguments: str) -> str:
    """What `scale` said, up to the name of the machine."""
    command = Launched(["scale", str(run.folder), *arguments], run.folder)
    assert command.ends() == 0, command.output
    return command.output.partition(socket.gethostname())[0]


def _processes(run: Launched) -> set[str]:
    """The run's processes that live now."""
    return set(json.loads((run.folder / "processes.json").read_text()))


def _workers(run: Launched) -> set[str]:
    """Whose samples stand in the log."""
    (rollouts,) = read_all(run.folder, ROLLOUTS)
    return {rollout.worker for rollout in rollouts if isinstance(rollout, Rollout)}


def _logs_of_others(run: Launched, role: str, event: str) -> set[str]:
    """Those actors of a role that `up` brought and that have logged an event."""
    names = {path.stem for path in (run.folder / "logs").glob(f"{role}-*.jsonl")} - set(ACTORS)
    return {name for name in names if run.events(name, event)}


def test_a_standby_takes_over_from_a_controller_that_hangs_and_wakes_up_again(
    launch: Callable[..., Launched], brake: Brake
) -> None:
    """Split brain: the old one wakes in the midst of its work and must not do any of it a second time."""
    run = launch(brake.override, f"steps={STEPS}", "hung_after_s=0")  # it shall wake up
    run.until_step(1)
    standby = Launched(["up", "controller", "--run", str(run.folder)], run.folder)
    try:
        run.until("a standby", lambda: "joined" in standby.output)
        hung = run.kill("controller", signal.SIGSTOP)
        run.until("the standby's lead", lambda: bool(_logs_of_others(run, "controller", "controller_became_active")))
        stood_at = run.steps_trained
        run.until_step(stood_at + 2)
        os.kill(hung, signal.SIGCONT)
        brake.release()
        assert run.ends() == 0, run.output
        assert standby.ends() == 0, standby.output
    finally:
        standby.destroy()
    assert_sound(run.folder, STEPS)
    noticed = ("controller_was_fenced", "controller_lost_its_lease")
    assert [line for event in noticed for line in run.events("controller", event)]
