"""A trainer of two processes is one actor: it dies as one, comes back as one, and may come back as another number."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.e2e.harness import Launched, assert_sound

pytestmark = pytest.mark.e2e

STEPS = 8


def rank_pids(run: Launched) -> dict[int, int]:
    """Rank to pid, of the trainer that runs now."""
    found = {}
    for process in psutil.Process(run.pid("trainer")).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "ops.trainer_rank" in process.cmdline() and "RANK" in process.environ():
                found[int(process.environ()["RANK"])] = process.pid
    return found


def trained_by_other(run: Launched) -> set[int]:
    """The versions of the steps that rank 1 has done, over all starts."""
    return {line["version"] for line in run.events("trainer-rank1", "step_trained")}


def test_a_rank_that_is_killed_comes_back_with_the_others_and_one_rank_goes_on(
    launch: Callable[..., Launched],
) -> None:
    run = launch(f"steps={STEPS}", "trainer.ranks=2", "trainer.checkpoint_every=1")
    run.until_step(2)
    run.until("the other rank's step", lambda: 2 in trained_by_other(run))
    job, ranks = run.pid("trainer"), rank_pids(run)
    assert set(ranks) == {0, 1}
    os.kill(ranks[1], signal.SIGKILL)
    run.until_replaced("trainer", job)
    run.until("the other rank to end", lambda: not psutil.pid_exists(ranks[0]))
    run.until_step(4)
    run.until("the other rank's step", lambda: 4 in trained_by_other(run))
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.ends() == 130, run.output
    assert trained_by_other(run) >= {1, 2, 3, 4}

    run = launch(f"steps={STEPS}", "trainer.ranks=1", resume=True)
    assert run.ends() == 0, run.output
    assert_sound(run.folder, STEPS)
