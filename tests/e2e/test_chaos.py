"""The hunt itself, short; and processes that hang instead of dying, which nobody is told of."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Launched, assert_sound

pytestmark = pytest.mark.e2e

HUNT_WAIT_S = 280.0
HUNTED = ("nats", "controller", "rollout", "reward", "reward-child", "trainer", "fork-server")  # launcher: test_resume


def test_processes_that_hang_are_killed_and_the_run_goes_on(launch: Callable[..., Launched]) -> None:
    """A deadlock, a stuck disk or a forgotten debugger: the process lives, so that nothing else would end the wait."""
    steps = 12
    # More than DEAF_S + BEAT_EVERY_S = 4 s, for which everybody's silence counts when the server hangs, and two beats
    # more that a busy machine may keep waiting.
    run = launch(f"steps={steps}", "hung_after_s=6", "reward.function=task.py:slow_reward")
    run.until_step(2)
    hung = run.kill("trainer", signal.SIGSTOP)
    run.until_replaced("trainer", hung)
    run.until_step(4)
    hung = run.kill("nats-server", signal.SIGSTOP)
    run.until_replaced("nats-server", hung)
    assert run.ends() == 0, run.output
    assert_sound(run.folder, steps)
    assert "trainer gave no sign of life" in run.output
    assert [event["process"] for event in run.events("launcher", "process_hung")] == ["trainer"]
    assert len(run.events("launcher", "server_hung")) == 1


def test_a_short_hunt_finds_nothing_lost(tmp_path: Path, recipe: Path) -> None:
    """`make chaos` in small: each kind of process is killed once, and the log audits clean."""
    out, folder = tmp_path / "chaos.md", tmp_path / "hunt"
    only = [part for kind in HUNTED for part in ("--kind", kind)]
    arguments = ["chaos", str(recipe), "steps=60", "--kills", str(len(HUNTED)), "--seed", "4", *only]
    hunt = Launched([*arguments, "--out", str(out), "--dir", str(folder)], folder)
    try:
        assert hunt.ends(HUNT_WAIT_S) == 0, hunt.output
    finally:
        hunt.destroy()
    table = out.read_text()
    assert "**0 lost, 0 twice**" in table
    for kind in HUNTED:
        assert f"| {kind} | 1 |" in table, table
