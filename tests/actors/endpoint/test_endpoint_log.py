"""What an agent did must stand on the log as it was, whatever it is and whenever somebody hangs up or dies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from actors.episode.endpoint.episode import trajectory_of
from actors.episode.endpoint.recorded import note_writer, recorded_notes, recorded_questions
from actors.episode.endpoint.session import Session
from actors.episode.policy import Bound
from actors.episode.trajectory import rollout_of
from bus.memory import MemoryBus, MemoryHub
from ops.text import HfTokenizer
from schemas import Answer, Prompt, Turn
from tests.actors.endpoint.chat_model import FakePolicy, answer_of
from tests.actors.endpoint.serving import Endpoint
from tests.actors.endpoint.test_endpoint_sessions import life, take

PROMPT = Prompt(group_id=3, index=1, group_size=1, prompt="p", task={}, seed=1, min_version=0)
USER: Any = [{"role": "user", "content": "a"}]
TOOLS: Any = [{"type": "function", "function": {"name": "find"}}]


@pytest.fixture
async def bus() -> MemoryBus:
    bus = MemoryBus("r", MemoryHub())
    await bus.connect()
    await bus.setup()
    return bus


def turn(number: int, context: dict[str, Any] | None = None) -> Turn:
    return Turn(
        group_id=3, index=1, number=number, prompt_tokens=np.array([1, 2], "<i4"), seed=1, min_version=0,
        context=context,
    )  # fmt: skip


async def test_calls_are_stored_however_deep_their_arguments_and_large_their_numbers(endpoint: Endpoint) -> None:
    deep = '{"a": {"b": {"c": [[{"d": 1}]]}}, "n": 123456789012345678901234567890, "x": 1e400}'
    said = iter([f'<tool_call>{{"name": "find", "arguments": {deep.replace("1e400", "2")}}}</tool_call>', "so", "so"])
    session = await endpoint.open(lambda prompt, choice: next(said))
    client = endpoint.client(session)
    first = (await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)).choices[0].message
    assert first.tool_calls
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "none"}
    await client.chat.completions.create(model="m", messages=[*USER, first, result], tools=TOOLS)
    own = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "find", "arguments": deep}}]}
    await client.chat.completions.create(model="m", messages=[*USER, own, result])  # type: ignore[list-item]
    made = rollout_of(PROMPT, trajectory_of(PROMPT, session))  # raises what cannot be stored
    assert made.messages[1]["tool_calls"][0]["function"]["arguments"].startswith('{"a": {"b"')
    policy: Any = session.policy
    for number, context in enumerate(policy.contexts):
        assert turn(number, context).context == context


async def test_what_was_refused_costs_a_session_nothing_in_its_next_life(
    bus: MemoryBus, endpoint: Endpoint, tokenizer: HfTokenizer
) -> None:
    asked = [turn(number, {"known": f"k{number}", "messages": USER}) for number in (0, 2, 5)]  # 1, 3, 4: never asked
    for one in asked:
        await bus.publish(one)
        tokens = [] if one.number == 2 else [7, 8]
        made = answer_of(tokens)
        await bus.publish(
            Answer(
                group_id=3, index=1, turn=one.id, tokens=made.tokens, logprobs=made.logprobs, segments=made.segments,
                finish="stop", text="", error="" if tokens else "the prompt leaves no room",
            )
        )  # fmt: skip
    recorded = await recorded_questions(bus, "3-1")
    assert [one is not None for one in recorded] == [True, False, True, False, False, True]

    def say(prompt: str, choice: int) -> Any:
        if len(policy.asked) + policy.skipped == 3:
            raise Bound("the prompt leaves no room")
        return [7, 8]

    policy = FakePolicy(tokenizer, say)
    session = Session(endpoint.registry.key_of("3-1"), "3-1", policy, tokenizer, endpoint.encoding)
    endpoint.sessions.append(session)
    await session.restore(recorded, [])
    assert [node.number for node in session.tree.heard] == [0, 5]
    assert policy.skipped == 3
    await endpoint.registry.open(session, offered=False)
    await endpoint.client(session).chat.completions.create(model="m", messages=USER)
    assert session.tree.at(6, 0) is not None  # its number is that of its turn


async def test_a_note_is_written_to_its_end_even_if_who_sent_it_hangs_up(
    bus: MemoryBus, tmp_path: Path, tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, publish = asyncio.Event(), bus.publish

    async def slow(message: Any) -> Any:
        await released.wait()
        return await publish(message)

    async with life(bus, tmp_path, tokenizer) as now, now.client("none") as client:
        session = await take(client)
        monkeypatch.setattr(bus, "publish", slow)
        async with now.client(session["api_key"]) as agent:
            with pytest.raises(openai.APITimeoutError):
                await agent.post("/rewards", cast_to=object, body={"reward": 0.5}, options={"timeout": 0.2})
            await asyncio.sleep(0.1)
            released.set()
            await agent.chat.completions.create(model="m", messages=USER)
            await asyncio.gather(
                agent.post("/sessions/current/end", cast_to=object, body={"reward": 2}),
                agent.post("/sessions/current/end", cast_to=object, body={"reward": 3}),
                return_exceptions=True,  # the second may come too late
            )
        made = await now.outcome()
    notes = await recorded_notes(bus, "4-0")
    assert [(note.kind, note.number) for note in notes] == [("taken", 0), ("reward", 1), ("end", 2)]
    assert made.reward == notes[-1].value  # the first end holds, here and in the next life


@pytest.mark.parametrize("stored", [False, True])
async def test_a_note_whose_storing_failed_leaves_no_gap(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    publish, write = bus.publish, note_writer(bus, PROMPT, 0)

    async def broken(message: Any) -> Any:
        if stored:
            await publish(message)
        raise ConnectionError

    monkeypatch.setattr(bus, "publish", broken)
    with pytest.raises(ConnectionError):
        await write("taken", None, None, "")
    monkeypatch.setattr(bus, "publish", publish)
    await write("reward", 0.5, None, "")
    await write("end", None, None, "")
    kinds = [note.kind for note in await recorded_notes(bus, "3-1")]
    assert kinds == (["taken"] if stored else []) + ["reward", "end"]


async def test_an_answer_that_was_built_on_or_rewarded_was_got(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "abc", pause_s=0.01)
    client = endpoint.client(session)
    for more in ([], [{"role": "assistant", "content": "abc"}, {"role": "user", "content": "b"}]):
        async with await client.chat.completions.create(model="m", messages=[*USER, *more], stream=True) as stream:
            async for chunk in stream:
                name = chunk.id
                break  # it has seen enough
        for exchange in session._exchanges:
            await exchange.nodes()
    assert [node.number for node in session.tree.heard] == [0]
    await client.post("/rewards", body={"reward": 1, "response_id": name}, cast_to=object)
    assert [node.number for node in session.tree.heard] == [0, 1]
