"""Reward children that are killed from outside, which says nothing about the user's function."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import uvloop

from actors.reward.actor import scored_of
from actors.reward.verdict import Verdict
from tests.actors.reward_pools import request, running, verdict_of
from tests.bus.samples import rollout
from tests.waiting import alive, eventually


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


async def test_who_is_killed_in_each_attempt_is_told_with_its_reason_and_their_number(tmp_path: Path) -> None:
    """A person who reads of the drop must see that nobody's function is to blame, and how often it was tried."""
    source = """
        import os, signal
        def reward(response): os.kill(os.getpid(), signal.SIGKILL)
    """
    verdict = await verdict_of(tmp_path, source, retries=2)
    scored = scored_of(rollout(0), 1, verdict)
    assert (scored.verdict, scored.reward) == ("error", None)
    assert scored.detail == "the reward process failed: it was killed by SIGKILL (3 attempts)"
    assert scored_of(rollout(0), 1, Verdict("error", detail="once")).detail == "once"
