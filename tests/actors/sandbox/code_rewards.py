"""The reward `code` on two processes, and all hostile programs by name, with the part that their verdict must have."""

import contextlib
from collections.abc import AsyncIterator

from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from tests.actors.sandbox.hostile_deaths import DEATHS
from tests.actors.sandbox.hostile_endings import ENDINGS
from tests.actors.sandbox.hostile_escapes import ESCAPES
from tests.actors.sandbox.hostile_hidden import HIDDEN
from tests.actors.sandbox.hostile_programs import HOSTILE

PROGRAMS = {name: (part, source) for name, part, source in (*HOSTILE, *ESCAPES, *DEATHS, *ENDINGS, *HIDDEN)}
TEST_TIME_S = 0.7
CHILDREN = 2


@contextlib.asynccontextmanager
async def pool_of(
    score: str = "fraction", test_time_s: float = TEST_TIME_S, memory_mb: int = 256
) -> AsyncIterator[RewardPool]:
    """A pool of the reward `code`, which asks each program once."""
    config = RewardConfig(
        function="code",
        options={"score": score, "test_time_s": test_time_s, "memory_mb": memory_mb},
        children=CHILDREN,
        retries=0,
    )
    pool = RewardPool(config)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
