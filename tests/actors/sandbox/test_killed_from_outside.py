"""A program that somebody outside kills is run again with all its time, and never gets a 0 for it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from actors.reward.code import Options, load
from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from actors.reward.sandbox import Limits, Sandbox, SandboxLost, runtime
from actors.reward.sandbox import launch as launching
from actors.reward.sandbox.pool import ATTEMPTS
from actors.reward.verdict import RewardRequest
from actors.reward.verifiers import Setting
from tests.actors.sandbox.processes import programs

LATE = "import time\ntime.sleep(1.2)\nprint(42)"
ROW = {"tests": [{"stdin": "", "stdout": "42"}]}


@contextmanager
def killing(after_s: float, times: int) -> Iterator[Callable[[], int]]:
    """`kill -9` of each of the first `times` programs that this process runs, so long after they are seen."""
    killed: set[psutil.Process] = set()
    ended = threading.Event()

    def work() -> None:
        while len(killed) < times and not ended.wait(0.01):
            for program in programs(psutil.Process().children(recursive=True)):
                if program not in killed and not ended.wait(after_s):
                    program.kill()
                    killed.add(program)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield lambda: len(killed)
    finally:
        ended.set()
        thread.join()


def test_who_is_killed_at_the_end_of_its_time_has_all_of_it_once_more() -> None:
    """With what was left of it, it ended as a timeout: a 0 for an honest program."""
    reward = load(Options(test_time_s=2.0, total_time_s=2.0), Setting(timeout_s=10.0))
    try:
        with killing(after_s=1.0, times=1) as killed:
            found = reward(f"```python\n{LATE}\n```", ROW)
            assert killed() == 1
    finally:
        reward.close()
    assert (found["reward"], found["detail"]) == (1.0, "passed 1/1")


def test_who_is_killed_each_time_is_no_result() -> None:
    """Out of memory on the machine, say: nothing is known about the program, and the attempts are bounded."""
    with Sandbox(Limits(time_s=20)) as sandbox, killing(after_s=0.0, times=ATTEMPTS) as killed:
        with pytest.raises(SandboxLost, match="the program was killed from outside"):
            sandbox.run_blocking("import time\ntime.sleep(20)")
        assert killed() == ATTEMPTS


async def test_a_call_without_time_for_another_run_is_an_error_that_is_retried() -> None:
    """A call that went on would end as a timeout, or be taken for a program that is too slow."""
    config = RewardConfig(function="code", options={"test_time_s": 2.0}, timeout_s=2.5, children=1, retries=1)
    pool = RewardPool(config)
    await pool.start()
    request = RewardRequest("s", "", f"```python\n{LATE}\n```", "stop", ROW)
    try:
        with killing(after_s=1.0, times=1):
            verdict = await asyncio.wait_for(pool.score(request), 30)
        with killing(after_s=1.0, times=2):
            dropped = await asyncio.wait_for(pool.score(request), 30)
    finally:
        await pool.close()
    assert (verdict.status, verdict.reward, verdict.attempts) == ("scored", 1.0, 2)
    assert (dropped.status, dropped.reward, dropped.attempts) == ("error", None, 2)
    assert "killed from outside" in dropped.detail
    assert "too little time left to run it again" in dropped.detail


def test_who_ignores_the_limit_of_cpu_time_is_killed_by_it_for_its_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's SIGKILL at the hard limit is nobody's from outside. Several threads reach it before their time."""
    limit = 'int(request["time_s"]) + 2'
    source = runtime.supervisor_source()
    assert source.count(limit) == 1
    monkeypatch.setattr(runtime, "supervisor_source", lambda: source.replace(limit, "1"))
    monkeypatch.setattr(launching, "compiled_supervisor", runtime.compiled_supervisor.__wrapped__)
    ignores = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    with Sandbox(Limits(time_s=25), children=1) as sandbox:
        began = time.monotonic()
        result = sandbox.run_blocking(ignores)
    assert result.status == "timeout"
    assert time.monotonic() - began < 20, "it was killed once, and not by its time"
