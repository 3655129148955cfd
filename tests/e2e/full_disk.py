"""The stage of `test_full_disk`: a program for a mount namespace of its own, where a part of a run's folder is small.

Its last line is JSON: how the run ended when the disk filled, what it said, how it ended when there was space again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.harness import Launched, audited

SIZE = "48m"
LARGER = "512m"
LEFT_BYTES = 256 << 10  # less than one version of the weights


def fill(folder: Path) -> None:
    """Take the space of the file system of a folder, all but `LEFT_BYTES`."""
    done = subprocess.run(["df", "--output=avail", "-B1", str(folder)], capture_output=True, text=True, check=True)
    left = int(done.stdout.split()[-1]) - LEFT_BYTES
    with contextlib.suppress(OSError), (folder / "ballast").open("wb") as file:  # the run writes meanwhile
        file.write(bytes(max(0, left)))


def main(recipe: Path, initial: Path, folder: Path, part: str, steps: int) -> None:
    """Run until the disk is full, make space, resume, and tell."""
    small = folder / part
    small.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(small)], check=True)
    shutil.copytree(initial, folder / "initial")
    command = ["run", str(recipe), f"steps={steps}", "--dir", str(folder), "--plain"]
    run = Launched(command, folder)
    try:
        run.until_step(3)
        fill(small)
        status = run.ends()
        said = run.output
        trained = run.steps_trained
        subprocess.run(["mount", "-o", f"remount,size={LARGER}", str(small)], check=True)
        resumed = Launched([*command, "--resume"], folder)
        try:
            resumed_status = resumed.ends()
        finally:
            resumed.destroy()
    finally:
        run.destroy()
    audit = audited(folder)
    told = {
        "status": status,
        "said": said.splitlines()[-4:],
        "trained": trained,
        "resumed_status": resumed_status,
        "resumed_said": resumed.output.splitlines()[-4:],
        "audit_clean": audit.clean,
        "ended": audit.report.ended,
        "steps": audit.report.totals["steps"],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
