"""A network cut hurts more than a death: nobody is told, both sides live on, and the cut-off one believes itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import run_apart

pytestmark = pytest.mark.e2e

STEPS = 24
NAMESPACE = ("unshare", "-rmn", "--fork", "--pid", "--kill-child", "--mount-proc")
CUT_S = 8.0  # at least, and until steps are done again: both sides have noticed, a new leader is elected


def why_not() -> str:
    """Why this machine cannot make network namespaces; empty if it can."""
    if missing := [name for name in ("unshare", "ip") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} is not installed (packages util-linux and iproute2)"
    script = (
        "mount -t tmpfs none /run && ip netns add n1 && ip link add bridge0 type bridge && ip link add v1 type veth"
    )
    done = subprocess.run(["unshare", "-rmn", "sh", "-c", script], capture_output=True, text=True, check=False)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else ""


def test_a_run_outlives_the_cut_of_one_servers_network_and_its_return(
    tmp_path: Path, recipe: Path, initial: Path
) -> None:
    """Three servers, each in a network of its own; the one that leads is cut off, and later it is back."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path / "run"
    shutil.copytree(initial, folder / "initial")
    command = [sys.executable, "-m", "tests.e2e.partition", str(tmp_path), str(recipe), str(STEPS), str(CUT_S)]
    told = run_apart(NAMESPACE, command)
    assert told["status"] == 0
    assert told["audit_clean"]
    assert told["steps_while_cut"] > 0
    assert told["steps_after"] > 0
