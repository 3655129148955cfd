"""Ctrl-C in the first seconds of a command ends it with one line: nobody must see a traceback of some library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "stub",
    ["typer.py", "yaml.py"],
    ids=["while the command line imports", "while the command begins"],
)
def test_ctrl_c_while_a_command_still_imports_ends_it_with_one_line(tmp_path: Path, stub: str) -> None:
    (tmp_path / stub).write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(20)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cli", "run", str(ROOT / "recipes" / "multiturn.yaml"), "--dir", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_the_children_of_a_launcher_leave_ctrl_c_to_it(tmp_path: Path) -> None:
    """The one that makes the model printed `Process prepare:` and a traceback of multiprocessing."""
    program = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from ops.supervise import fork_server, forked\n"
        "async def main():\n"
        "    process = await forked(fork_server(heavy=False), os.kill, (0, 2), 'prepare', Path(sys.argv[1]))\n"
        "    await asyncio.to_thread(process.join)\n"
        "    return process.exitcode\n"
        "if __name__ == '__main__':\n"
        "    import signal\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    sys.exit(asyncio.run(main()))\n"
    )
    (tmp_path / "launch.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "launch.py"), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        start_new_session=True,
    )
    assert (done.returncode, done.stderr, (tmp_path / "out").read_text()) == (0, "", "")
