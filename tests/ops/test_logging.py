"""Logs are what is left when a process is gone: one JSON line an event, whoever wrote it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import logging, sys, warnings
from pathlib import Path
import structlog
log = structlog.get_logger()  # at import, before anything is configured, as all modules do
from ops.logging import configure
configure(Path(sys.argv[1]) if len(sys.argv) > 1 else None, run="a-run", actor="trainer")
log.info("batch_trained", step=3, path=Path("x"))
logging.getLogger("transformers").warning("odd %s", "weights")
warnings.warn("old", stacklevel=1)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("actor_failed")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since the configuration is the process's."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )


def test_a_file_gets_every_event_as_json_with_run_and_actor(tmp_path: Path) -> None:
    """Also what libraries warn of, and exceptions with their traceback; standard error is left to people."""
    path = tmp_path / "logs" / "trainer.jsonl"
    done = run(str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["batch_trained", "library_warned", "python_warned", "actor_failed"]
    assert all((line["run"], line["actor"]) == ("a-run", "trainer") for line in lines)
    assert lines[0] | {"timestamp": ""} == {
        "timestamp": "", "level": "info", "event": "batch_trained", "run": "a-run", "actor": "trainer", "step": 3,
        "path": "x",
    }  # fmt: skip
    assert lines[1]["said"] == "odd weights"
    assert "ZeroDivisionError" in lines[3]["exception"]
    assert done.stderr == ""


def test_without_a_file_and_a_terminal_the_lines_go_to_standard_error() -> None:
    """Containers collect them there; standard output belongs to results."""
    done = run()
    assert [json.loads(line)["level"] for line in done.stderr.splitlines()] == ["info", "warning", "warning", "error"]
    assert done.stdout == ""


def test_a_machine_without_a_gpu_is_no_news() -> None:
    """The first thing that a newcomer saw was a warning of DeepSpeed, of which nothing had been asked."""
    pytest.importorskip("deepspeed")
    program = "from ops.logging import quiet_libraries; quiet_libraries(); import deepspeed"
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "accelerator" not in done.stdout + done.stderr
