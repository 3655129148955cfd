"""Every honest program passes every test: a sandbox that is too strict teaches the model to write less."""

import asyncio
from typing import Any

from actors.reward.verdict import RewardRequest, Verdict
from tests.actors.sandbox.code_rewards import CHILDREN, pool_of
from tests.actors.sandbox.honest_programs import HONEST


def as_rows(given: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    return [
        {"stdin": entered, "stdout": wanted}
        if isinstance(entered, str)
        else {"function": "solve", "args": entered, "expected": wanted}
        for entered, wanted in given
    ]


async def test_all_honest_programs_pass_all_their_tests() -> None:
    """Through the real reward function, on two processes at once."""
    verdicts: dict[str, Verdict] = {}
    waiting = list(HONEST)

    async with pool_of("all", test_time_s=5.0, memory_mb=512) as pool:

        async def work() -> None:
            while waiting:
                name, source, tests = waiting.pop()
                request = RewardRequest(name, "", f"```python\n{source}\n```", "stop", {"tests": as_rows(tests)})
                verdicts[name] = await asyncio.wait_for(pool.score(request), 30)

        async with asyncio.TaskGroup() as group:
            for _ in range(CHILDREN):
                group.create_task(work())
    assert len(verdicts) == len(HONEST) >= 60
    failed = {name: (verdict.status, verdict.detail) for name, verdict in verdicts.items() if verdict.reward != 1.0}
    assert failed == {}
