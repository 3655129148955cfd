"""CPU seconds are what a run is told to have cost: whoever burns them for an actor must be counted, and only once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from actors.clock import SystemClock

BURN = "import time\nbegun = time.process_time()\nwhile time.process_time() - begun < 0.3: pass\n"
WAIT = "print('ready', flush=True); time.sleep(60)\n"
NESTED = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {BURN + WAIT!r}])\ntime.sleep(60)\n"


@pytest.mark.parametrize("program", [BURN + WAIT, NESTED], ids=["a child", "a child's child"])
def test_processes_that_live_on_count_as_those_that_have_ended(program: str) -> None:
    """vLLM decodes in children that end with the worker, and reward functions in some that end with theirs."""
    clock = SystemClock()
    before_s = clock.cpu_s()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            alive_s = clock.cpu_s() - before_s
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(child.pid)], check=True)
    ended_s = clock.cpu_s() - before_s
    assert 0.25 < alive_s < 3.0
    assert alive_s <= ended_s < alive_s + 1.0, "it only rises, and nobody is counted twice"
