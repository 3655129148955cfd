"""A machine that reaches the server only, and not the run's folder, must still be of use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bus.table import ROLLOUTS, WEIGHTS
from schemas import Rollout, WeightVersion
from tests.e2e.harness import ROOT, Brake, Launched, assert_sound, read_all

pytestmark = pytest.mark.e2e

STEPS = 24  # enough for others to come while the run is braked
WEIGHTS_AS_DELTAS = ("rollout.dtype=bfloat16", "trainer.lr=1e-5", "trainer.publish.full_every=5")


def joined(run: Launched, elsewhere: Path, temporary: str) -> subprocess.Popen[bytes]:
    """`rollstream up rollout` where there is nothing of the run but where its server is."""
    (elsewhere / "known").mkdir(parents=True)
    shutil.copy(run.folder / "run.json", elsewhere / "known")
    return subprocess.Popen(
        [sys.executable, "-m", "cli", "up", "rollout", "--run", str(elsewhere / "known")],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": temporary},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.fixture
def temporary() -> Iterator[str]:
    """A folder with a cache of its own, at a short path."""
    with tempfile.TemporaryDirectory(prefix="far-", dir="/tmp") as folder:
        yield folder


def of_others(run: Launched) -> list[Rollout]:
    """Samples of workers that the run did not start."""
    (rollouts,) = read_all(run.folder, ROLLOUTS)
    return [one for one in rollouts if isinstance(one, Rollout) and one.worker != "rollout-0"]


def test_a_worker_that_does_not_see_the_folder_gets_weights_over_the_bus(
    launch: Callable[..., Launched], brake: Brake, tmp_path: Path, temporary: str
) -> None:
    run = launch(*WEIGHTS_AS_DELTAS, brake.override, "bus.weights=both", f"steps={STEPS}", "rollout.slots=4")
    run.until_step(2)
    far = joined(run, tmp_path / "elsewhere", temporary)
    try:
        run.until("samples of the far worker under new weights", lambda: any(
            one.segments and one.segments[-1][0] > 2 for one in of_others(run)
        ))  # fmt: skip
        brake.release()
        assert run.ends() == 0, run.output
    finally:
        os.killpg(far.pid, signal.SIGKILL)
        print(far.communicate()[0].decode())  # shown if the test fails
    assert_sound(run.folder, STEPS)
    (versions,) = read_all(run.folder, WEIGHTS)
    kinds = [version.kind for version in versions if isinstance(version, WeightVersion)]
    assert kinds == ["full" if version % 5 == 0 else "delta" for version in range(STEPS + 1)]
    assert not list((tmp_path / "elsewhere").glob("**/weights"))
    assert (tmp_path / "elsewhere" / "runs" / "run" / "initial" / "config.json").exists()
