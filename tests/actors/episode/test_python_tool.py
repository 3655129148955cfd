"""What a model's program prints, and that its sandbox died, reaches the model in its next turn: no episode is lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from actors.episode.actor import EpisodeWorker
from actors.episode.config import EpisodeConfig
from actors.episode.tool import Options, ToolUse
from actors.episode.tool_calls import ToolCall
from actors.reward.sandbox import Result, Sandbox, SandboxLost
from bus.memory import MemoryBus, MemoryHub
from bus.port import Bus, Delivery
from bus.shell import serve
from bus.table import ROLLOUTS, TURN_WORKERS
from schemas import Answer, Message, Rollout, Turn
from tests.actors.episode.test_episode_worker import PROMPT, Digits, at_work, first

PROGRAM = "print(6 * 7)"


async def programmer(bus: Bus) -> None:
    """Answers the first turn with a program, and every other with a word."""

    async def answer(message: Message, delivery: Delivery) -> list[Message]:
        assert isinstance(message, Turn)
        call = json.dumps({"name": "python", "arguments": {"code": PROGRAM}})
        text = f"<tool_call>{call}</tool_call>" if message.number == 0 else "so"
        tokens, logprobs = np.array([5], "<i4"), np.array([-1], "<f4")
        return [
            Answer(
                group_id=1, index=0, turn=message.id, tokens=tokens, logprobs=logprobs, segments=((0, 1),),
                finish="stop", text=text,
            )
        ]  # fmt: skip

    await serve(bus, TURN_WORKERS, answer, room=lambda: 8, stop=asyncio.Event(), name="model")


@pytest.mark.parametrize("lost", [False, True])
async def test_a_program_is_run_within_an_episode(lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(self: Sandbox, program: str) -> Result:
        raise SandboxLost("killed from outside")

    bus = MemoryBus("run", MemoryHub())
    await bus.setup(ack_wait_s=0.3)
    if lost:
        monkeypatch.setattr(Sandbox, "run", dies)
    use = ToolUse(Options(tools=("python",)), tmp_path)
    worker = EpisodeWorker(bus, EpisodeConfig(), use, Digits(), 8, "episode-0")
    async with at_work(programmer(bus)), at_work(worker.run(asyncio.Event())):
        await bus.publish(PROMPT)
        rollout = await first(bus, ROLLOUTS)
    assert isinstance(rollout, Rollout)
    _, told, said = rollout.messages
    what = "error: python could not run the program" if lost else "42\n"
    assert told["content"] == f"<tool_response>{what}</tool_response>"
    assert said["content"] == "so"
    assert rollout.observations.tolist() == [1, len(told["content"])]


async def test_a_program_that_waits_for_a_sandbox_has_all_of_its_time(tmp_path: Path) -> None:
    """Many episodes call at once; what waits behind others was told that it took too long, and had not begun."""
    use = ToolUse(Options(tools=("python",), timeout_s=2.5), tmp_path)
    await use.start()
    call = ToolCall("python", {"code": "import time; time.sleep(0.6); print('done')"})
    late = ToolCall("python", {"code": "print('begun', flush=True)\nwhile True: pass"})
    try:
        async with asyncio.timeout(60):
            told = await asyncio.gather(*(use._called(call) for _ in range(6)), use._called(late))
    finally:
        await use.close()
    assert told == ["done\n"] * 6 + ["error: begun\n\npython took longer than 2.5 s"]
