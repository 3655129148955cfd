"""Agents that nobody has changed talk on while weights change and workers are killed, and what is trained is what they
were answered."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus.table import ANSWERS, ROLLOUTS
from schemas import Answer, Rollout
from tests.e2e.agents.clients import ASYNC, SYNC, serve
from tests.e2e.harness import Launched, assert_sound, read_all

pytestmark = pytest.mark.e2e
RECIPE = Path(__file__).parent / "agents" / "recipe.yaml"
STEPS = 9  # so many that the endpoint is needed again after it was killed


async def until(what: str, run: Launched, clients: list[asyncio.Task[None]], holds: Any, wait_s: float = 120.0) -> None:
    async with asyncio.timeout(wait_s):
        while not holds():
            assert run.process.poll() is None, f"ended before {what}:\n{run.output}"
            for client in clients:
                if client.done():
                    client.result()
            await asyncio.sleep(0.05)


async def test_agents_talk_on_while_weights_change_and_workers_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    run = Launched(["run", str(RECIPE), "--dir", str(folder), "--plain"], folder)
    done: list[str] = []
    stop = asyncio.Event()
    clients: list[asyncio.Task[None]] = []
    place = folder / "endpoint-episode-0.json"
    try:
        await until("the endpoint", run, clients, place.exists)
        url = f"http://127.0.0.1:{json.loads(place.read_text())['port']}/v1"
        clients = [asyncio.create_task(serve(url, style, done, stop)) for style in range(len([*SYNC, *ASYNC]))]
        await until("a step", run, clients, lambda: run.steps_trained >= 1)
        killed = run.kill("rollout-0")
        await until("two more", run, clients, lambda: run.steps_trained >= 3)
        episode = run.kill("episode-0")
        await until("the end", run, clients, lambda: run.steps_trained >= STEPS)
        stop.set()
        assert await asyncio.to_thread(run.ends) == 0, run.output
    finally:
        stop.set()
        run.destroy()
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    assert killed != episode
    audit = await asyncio.to_thread(assert_sound, folder, STEPS)
    assert audit.report.totals["notes"] > 0
    finished = Counter(done)
    assert {agent.__name__ for agent in (*SYNC, *ASYNC)} <= set(finished), finished
    rollouts, answers = await asyncio.to_thread(read_all, folder, ROLLOUTS, ANSWERS)
    by_turn = {a.turn: a for a in answers if isinstance(a, Answer)}
    turns: Counter[int] = Counter()
    versions: set[int] = set()
    for rollout in rollouts:
        assert isinstance(rollout, Rollout)
        made = np.ones(len(rollout.tokens), bool)
        for start, count in rollout.observations.reshape(-1, 2).tolist():
            made[start : start + count] = False
        said = [by_turn[turn] for turn in rollout.turns]
        assert rollout.tokens[made].tolist() == [token for answer in said for token in answer.tokens.tolist()]
        assert rollout.logprobs[made].tolist() == [p for answer in said for p in answer.logprobs.tolist()]
        turns[len(rollout.turns)] += 1
        versions |= {version for answer in said for version, _ in answer.segments}
        assert "answer" not in json.dumps(rollout.messages)
    assert turns[3] > len(rollouts) / 2, turns
    assert len(versions) >= 3
    assert (
        run.events("episode-0", "endpoint_listens")[0]["url"] == run.events("episode-0", "endpoint_listens")[-1]["url"]
    )
    assert len(run.events("episode-0", "endpoint_listens")) == 2
