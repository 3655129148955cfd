"""Reward children that are killed from outside, which says nothing about the user's function."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import uvloop

from actors.reward.verdict import Verdict
from tests.actors.test_reward_pool import alive, eventually, request, running, verdict_of


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_child_that_was_killed_while_it_waited_is_replaced_without_counting(tmp_path: Path, run: Any) -> None:
    """Nobody failed: the sample keeps its attempts, and the worker lives on. The loops differ in what they raise."""

    async def killed_between_two_requests() -> Verdict:
        source = "import os\ndef reward(response): return {'reward': 1, 'pid': os.getpid()}"
        async with running(tmp_path, source, retries=0) as pool:
            pid = int((await pool.score(request())).parts["pid"])
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: not alive(pid))
            await asyncio.sleep(0.1)
            return await pool.score(request())

    verdict = run(killed_between_two_requests())
    assert (verdict.status, verdict.attempts) == ("scored", 1), verdict.detail


async def test_a_child_that_is_killed_while_it_loads_is_started_again(tmp_path: Path) -> None:
    """It ended a run, and told the user to mend a function that was sound."""
    source = """
        import os, pathlib, signal
        mark = pathlib.Path(__file__).with_name("killed")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        def reward(response): return 1
    """
    assert (await verdict_of(tmp_path, source)).status == "scored"
