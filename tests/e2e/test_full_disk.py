"""A disk that fills up is the commonest end of a long run: it must cost nothing, and say what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import run_apart

pytestmark = pytest.mark.e2e

STEPS = 30  # more than there is space for
NAMESPACE = ("unshare", "-rm", "--fork", "--pid", "--kill-child", "--mount-proc")


def why_not() -> str:
    """Why this machine cannot give a program a small file system of its own; empty if it can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed (package util-linux)"
    script = "mount -t tmpfs -o size=1m none /mnt && mount -o remount,size=2m /mnt"
    done = subprocess.run([*NAMESPACE, "sh", "-c", script], capture_output=True, text=True, check=False)
    return f"no mount namespaces here: {done.stderr.strip()}" if done.returncode else ""


@pytest.mark.parametrize("part", ["nats", "."])
def test_a_run_whose_disk_fills_up_says_so_and_goes_on_when_there_is_space(
    part: str, tmp_path: Path, recipe: Path, initial: Path
) -> None:
    """The log alone, whose server says little about it; and everything: weights, checkpoints, logs."""
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.e2e.full_disk", str(recipe), str(initial), str(tmp_path / "run"), part]
    told = run_apart(NAMESPACE, [*command, str(STEPS)])
    said = "\n".join(told["said"])
    assert told["status"] == 2, said
    assert "error: " in said
    assert "ree some space" in said or "ree disk space" in said
    assert "--resume" in said
    assert told["trained"] < STEPS
    assert told["resumed_status"] == 0, told["resumed_said"]
    assert told["audit_clean"]
    assert told["ended"]
    assert told["steps"] == STEPS
