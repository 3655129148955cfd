"""A reward pool over a function that a test writes, and what it is asked."""

import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from actors.reward.verdict import RewardRequest, Verdict


def request(response: str = "5", finish: str = "stop", **task: Any) -> RewardRequest:
    """Of the sample whose answer is 5."""
    return RewardRequest("g1/0", "2+3=", response, finish, {"answer": "5", **task}, tokens=[7, 1])  # type: ignore[arg-type]


@asynccontextmanager
async def running(base: Path, source: str, **config: Any) -> AsyncIterator[RewardPool]:
    """A pool for the function `reward` in `source`, a file in the folder `base`."""
    (base / "rewards.py").write_text(textwrap.dedent(source))
    pool = RewardPool(RewardConfig(function="rewards.py:reward", **config), base)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def verdict_of(base: Path, source: str, **config: Any) -> Verdict:
    """On one request."""
    async with running(base, source, **config) as pool:
        return await pool.score(request())
