"""A process that has imported all that a trainer needs, and forks a trainer for each line that it is sent.

A trainer that is started forty times would spend three seconds each time on importing torch.

python -m tests.e2e.kills.forks        # {"folder": …, "run": …, "url": …, "death": {…} or null} → a pid, then a status
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
IMPORTED = (
    "ops.preload",
    "actors.trainer.actor",
    "actors.trainer.checkpoint",
    "actors.trainer.learner",
    "ops.trained_model",
    "peft",
    "tests.e2e.kills.points",
)


class Forks:
    """The client: starts trainers one at a time. Its process ends with ours, and takes the trainer with it."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.kills.forks"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, folder: Path, run: str, url: str, death: dict[str, Any] | None) -> int:
        """Start a trainer of the run in `folder`, by its recipe; returns its pid."""
        assert self._server.stdin is not None
        order = {"folder": str(folder), "run": run, "url": url, "death": death}
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return self._told()

    def ended(self) -> int:
        """Wait for the end of the trainer; returns its exit status, negative after a signal."""
        return self._told()

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.communicate()

    def _told(self) -> int:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the fork server has ended"
        return int(line)


def serve() -> None:
    """Read orders until standard input ends."""
    from ops.supervise import die_with_parent

    for module in IMPORTED:
        importlib.import_module(module)
    die_with_parent()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            status = 1
            try:
                status = _live(json.loads(line))
            finally:
                os._exit(status)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _live(order: dict[str, Any]) -> int:
    """The life of a trainer, as the supervisor starts it; returns its exit status."""
    from ops.host import ProcessSpec, main
    from tests.e2e.kills.points import Death, arm

    folder = Path(order["folder"])
    (folder / "logs").mkdir(exist_ok=True)
    output = os.open(folder / "logs" / "trainer.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if order["death"] is not None:
        arm(Death(folder, **order["death"]))
    recipe = (folder / "recipe.yaml").read_text()
    try:
        main(ProcessSpec((("trainer", "trainer"),), order["run"], order["url"], folder, recipe))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    serve()
