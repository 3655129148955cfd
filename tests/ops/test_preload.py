"""Ctrl-C in the first seconds of a run hits the fork server in its imports: nobody must see a traceback of them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ctrl_c_while_the_fork_server_imports_is_left_to_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('went on', flush=True)\nraise SystemExit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import ops.preload"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "went on\n", "")
