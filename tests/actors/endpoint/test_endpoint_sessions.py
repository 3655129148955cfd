"""An agent from outside takes a task, may vanish at any moment, and outlives the worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.episode.config import EpisodeConfig
from actors.episode.endpoint.episode import AgentEpisode
from actors.episode.endpoint.place import Place
from actors.episode.endpoint.recorded import recorded_notes
from actors.episode.policy import GivenUp
from actors.episode.trajectory import Trajectory
from bus.memory import MemoryBus, MemoryHub
from ops.text import HfTokenizer
from schemas import Prompt
from tests.actors.endpoint.chat_model import FakePolicy

USER: Any = [{"role": "user", "content": "2+3"}]
PROMPT = Prompt(group_id=4, index=0, group_size=1, prompt=USER, task={"answer": "5", "level": 2}, seed=1, min_version=0)


class Life:
    """One life of a worker, with one episode."""

    def __init__(self, bus: MemoryBus, folder: Path, tokenizer: HfTokenizer, **endpoint: Any) -> None:
        config = EpisodeConfig.model_validate({"agent": "external", "endpoint": {"wait_s": 0.3} | endpoint})
        self.policy: Any = FakePolicy(tokenizer, lambda prompt, choice: "5")
        place = Place(folder / "place.json", 0)
        self.episode = AgentEpisode(bus, config, folder, place, tokenizer, "policy", 1.0, 50)
        self.running: asyncio.Task[Trajectory] | None = None

    async def start(self) -> None:
        await self.episode.start()
        self.running = asyncio.create_task(self.episode.run(PROMPT, self.policy))

    async def outcome(self) -> Trajectory:
        assert self.running is not None
        return await asyncio.wait_for(self.running, 20)

    async def end(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        await self.episode.close()

    def client(self, key: str, retries: int = 0) -> Any:
        return openai.AsyncOpenAI(base_url=self.episode.url, api_key=key, max_retries=retries, timeout=20)


@contextlib.asynccontextmanager
async def life(*args: Any, **endpoint: Any) -> AsyncIterator[Life]:
    made = Life(*args, **endpoint)
    await made.start()
    try:
        yield made
    finally:
        await made.end()


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus("r", MemoryHub())
    await bus.connect()
    await bus.setup()
    yield bus
    await bus.close()


async def take(client: Any) -> dict[str, Any]:
    session: dict[str, Any] = await client.post("/sessions", cast_to=object, body={})
    return session


async def test_a_task_is_handed_out_once_and_without_what_the_recipe_does_not_name(
    bus: MemoryBus, tmp_path: Path, tokenizer: HfTokenizer
) -> None:
    async with life(bus, tmp_path, tokenizer, task_fields=["level"]) as now, now.client("none") as client:
        session = await take(client)
        assert (session["prompt"], session["level"], "answer" in session) == (USER, 2, False)
        with pytest.raises(openai.RateLimitError):
            await take(client)
        async with now.client(session["api_key"]) as agent:
            await agent.chat.completions.create(model="m", messages=USER)
            await agent.post("/sessions/current/end", cast_to=object, body={"reward": 1})
        made = await now.outcome()
        assert (made.reward, len(made.turns), made.messages) == (1.0, 1, [{"role": "assistant", "content": "5"}])
        async with now.client(session["api_key"]) as agent:  # whose answer was lost, and that says it again
            again: Any = await agent.post("/sessions/current/end", cast_to=object, body={"reward": 5})
        assert (again["ended"], made.reward) == (True, 1.0)


async def test_who_has_not_the_token_gets_no_task(
    bus: MemoryBus, tmp_path: Path, tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLSTREAM_AGENT_TOKEN", "a-token-of-some-length")
    async with life(bus, tmp_path, tokenizer) as now:
        async with now.client("another-token-of-a-length") as client:
            with pytest.raises(openai.AuthenticationError):
                await take(client)
        async with now.client("a-token-of-some-length") as client:
            assert (await take(client))["id"] == "session-4-0"


@pytest.mark.parametrize(("on_idle", "asks"), [("drop", True), ("score", True), ("score", False)])
async def test_a_session_whose_agent_is_silent_ends_as_the_recipe_says(
    bus: MemoryBus, tmp_path: Path, tokenizer: HfTokenizer, on_idle: str, asks: bool
) -> None:
    async with life(bus, tmp_path, tokenizer, idle_s=2.0, on_idle=on_idle) as now, now.client("none") as client:
        session = await take(client)
        if asks:
            async with now.client(session["api_key"]) as agent:
                await agent.chat.completions.create(model="m", messages=USER)
        if on_idle == "score" and asks:
            assert (await now.outcome()).reward is None
        else:
            with pytest.raises(GivenUp, match="silent"):
                await now.outcome()


async def test_a_session_outlives_its_worker_at_the_same_address_with_its_rewards(
    bus: MemoryBus, tmp_path: Path, tokenizer: HfTokenizer
) -> None:
    async with life(bus, tmp_path, tokenizer) as before, before.client("none") as client:
        session = await take(client)
        async with before.client(session["api_key"]) as agent:
            await agent.post("/rewards", cast_to=object, body={"reward": 0.5})
    assert [note.kind for note in await recorded_notes(bus, "4-0")] == ["taken", "reward"]
    async with life(bus, tmp_path, tokenizer) as after, after.client("none") as client:
        assert after.episode.url == before.episode.url
        with pytest.raises(openai.RateLimitError):
            await take(client)  # its agent has it still
        async with after.client(session["api_key"]) as agent:
            await agent.chat.completions.create(model="m", messages=USER)
            await agent.post("/sessions/current/end", cast_to=object, body={})
        made = await after.outcome()
        assert (made.reward, len(made.turns)) == (0.5, 1)
    async with life(bus, tmp_path, tokenizer) as again:  # killed before its rollout was stored
        assert (await again.outcome()).reward == 0.5


async def test_what_an_agent_gives_up_is_dropped_with_its_words(
    bus: MemoryBus, tmp_path: Path, tokenizer: HfTokenizer
) -> None:
    async with life(bus, tmp_path, tokenizer) as now, now.client("none") as client:
        session = await take(client)
        async with now.client(session["api_key"]) as agent:
            await agent.post("/sessions/session-4-0/end", cast_to=object, body={"drop": "the site was down"})
        with pytest.raises(GivenUp, match="the site was down"):
            await now.outcome()
