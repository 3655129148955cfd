"""A reward function that is mended while the run goes on: which code gave which verdict must never be a guess."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from schemas import UserError
from tests.actors.reward_pools import request, running
from tests.waiting import eventually

ONE = "from helper import VALUE\ndef reward(response): return VALUE\n"


async def reward_of(pool: RewardPool) -> tuple[float | None, str]:
    verdict = await pool.score(request())
    return verdict.reward, verdict.digest


async def test_a_reload_takes_the_files_as_they_are_and_verdicts_tell_which(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 1")
    async with running(tmp_path, ONE) as pool:
        first = await reward_of(pool)
        (tmp_path / "helper.py").write_text("VALUE = 2")
        assert await reward_of(pool) == first, "nothing changes before the word"
        assert await pool.reload() == pool.digest
        second = await reward_of(pool)
        assert (first[0], second[0]) == (1.0, 2.0)
        assert first[1] != second[1] == pool.digest
        (tmp_path / "helper.py").write_text("VALUE = 1")
        await pool.reload()
        assert await reward_of(pool) == first, "equal code has an equal digest"


async def test_what_is_broken_is_not_taken_and_the_old_code_runs_on_in_new_processes(tmp_path: Path) -> None:
    """A process that is killed afterwards must not load the broken file either, nor a helper that has changed."""
    (tmp_path / "helper.py").write_text("VALUE = 1")
    async with running(tmp_path, ONE) as pool:
        first = await reward_of(pool)
        (tmp_path / "rewards.py").write_text("def reward(:")
        (tmp_path / "helper.py").write_text("VALUE = 2")
        with pytest.raises(UserError, match=r"rewards.py, line 1 failed with SyntaxError"):
            await pool.reload()
        for child in pool._alive:
            os.kill(child._process.pid, signal.SIGKILL)
        await eventually(lambda: not any(child.alive for child in pool._alive))
        (tmp_path / "rewards.py").unlink()
        assert await reward_of(pool) == first


async def test_calls_under_way_end_with_the_code_that_they_began_with(tmp_path: Path) -> None:
    source = "import time\ndef reward(response): time.sleep(0.5); return 1"
    async with running(tmp_path, source, children=1) as pool:
        before = pool.digest
        call = asyncio.create_task(pool.score(request()))
        await asyncio.sleep(0.1)
        (tmp_path / "rewards.py").write_text("def reward(response): return 2")
        await pool.reload()
        verdict = await call
        assert (verdict.reward, verdict.digest) == (1.0, before)
        assert await reward_of(pool) == (2.0, pool.digest)
        assert len(pool._alive) == 1, "the old process has ended"


async def test_the_digest_is_of_code_and_options_and_not_of_the_place(tmp_path: Path) -> None:
    """Two machines that hold the same recipe must tell the same digest, or their batches would look mixed."""
    digests = []
    for place, weight, text in (("a", 1, ""), ("b", 1, ""), ("c", 2, ""), ("d", 1, "# other\n")):
        (tmp_path / place).mkdir()
        source = text + "def reward(response, weight): return weight"
        async with running(tmp_path / place, source, options={"weight": weight}) as pool:
            digests.append(pool.digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


async def test_failures_tell_the_digest_too(tmp_path: Path) -> None:
    async with running(tmp_path, "def reward(response): import os; os._exit(1)", retries=0) as pool:
        assert (await pool.score(request())).digest == pool.digest != ""


async def test_a_function_named_by_its_module_is_reloaded_too(tmp_path: Path) -> None:
    """With all of its package that it imports; and a compiled file that looks newer is not run in its place."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rules.py").write_text("from mine.values import VALUE\ndef reward(response): return VALUE\n")
    (package / "values.py").write_text("VALUE = 1")
    pool = RewardPool(RewardConfig(function="mine.rules:reward", children=1), tmp_path)
    await pool.start()
    try:
        first = await reward_of(pool)
        (package / "values.py").write_text("VALUE = 2")
        for child in pool._alive:
            os.kill(child._process.pid, signal.SIGKILL)
        await eventually(lambda: not any(child.alive for child in pool._alive))
        assert await reward_of(pool) == first
        await pool.reload()
        second = await reward_of(pool)
        assert (second[0], second[1] != first[1]) == (2.0, True)
    finally:
        await pool.close()
