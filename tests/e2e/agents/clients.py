"""Agents of three turns, as people write them, by OpenAI's client in all its ways and by a framework."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

RETRIES = 6  # over a restart of what serves them
TURNS = 3
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def sync_chat(session: dict[str, Any], client: openai.OpenAI) -> None:
    """Plain chat completions, with tools."""
    messages = list(session["prompt"])
    for turn in range(TURNS):
        answer = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, logprobs=True)
        messages += [answer.choices[0].message, {"role": "user", "content": f"Again, {turn}."}]


def sync_responses(session: dict[str, Any], client: openai.OpenAI) -> None:
    """The responses API, each going on from the one before, on the server's word."""
    response = client.responses.create(model="any", input=session["prompt"], instructions="Add.")
    for turn in range(1, TURNS):
        response = client.responses.create(
            model="any", input=f"Again, {turn}.", previous_response_id=response.id, instructions="Add."
        )


def sync_completions(session: dict[str, Any], client: openai.OpenAI) -> None:
    """Text that grows."""
    text = session["prompt"][0]["content"]
    for turn in range(TURNS):
        text += client.completions.create(model="any", prompt=text, max_tokens=8).choices[0].text + f" {turn}:"


async def async_stream(session: dict[str, Any], client: openai.AsyncOpenAI) -> None:
    """Streamed chat; a stream that breaks off is asked for again, as no client does by itself."""
    messages = list(session["prompt"])

    async def ask() -> str:
        stream = await client.chat.completions.create(model="any", messages=messages, stream=True, logprobs=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    for turn in range(TURNS):
        text = await _again(ask)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Again, {turn}."}]


async def async_responses(session: dict[str, Any], client: openai.AsyncOpenAI) -> None:
    """Streamed responses, with the whole input each time."""
    items = list(session["prompt"])

    async def ask() -> str:
        stream = await client.responses.create(model="any", input=items, stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    for turn in range(TURNS):
        text = await _again(ask)
        items.extend([{"role": "assistant", "content": text}, {"role": "user", "content": f"Again, {turn}."}])


async def framework(session: dict[str, Any], client: openai.AsyncOpenAI) -> None:
    """An agent of a framework that knows nothing of us, with a tool that it may call."""
    agent = Agent(OpenAIChatModel("any", provider=OpenAIProvider(openai_client=client)), instructions="Add.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """The sum."""
        return a + b

    history: Any = None
    for turn in range(TURNS):
        said = session["prompt"][0]["content"] if history is None else f"Again, {turn}."
        history = (await agent.run(said, message_history=history)).all_messages()


async def _again(ask: Callable[[], Awaitable[str]]) -> str:
    for _ in range(RETRIES):
        try:
            return await ask()
        except openai.APIError:  # of which a connection that breaks is one
            await asyncio.sleep(0.5)
        except Exception as error:
            if "httpx" not in type(error).__module__ and "httpcore" not in type(error).__module__:
                raise
            await asyncio.sleep(0.5)
    return await ask()


SYNC: list[Any] = [sync_chat, sync_responses, sync_completions]
ASYNC: list[Any] = [async_stream, async_responses, framework]


async def serve(base_url: str, style: int, done: list[str], stop: asyncio.Event) -> None:
    """Take sessions and run one agent on them, until `stop`."""
    agent = [*SYNC, *ASYNC][style]
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=RETRIES, timeout=60) as taking:
        while not stop.is_set():
            try:
                session: Any = await taking.post("/sessions", cast_to=object, body={})
            except openai.APIError:
                await asyncio.sleep(0.2)
                continue
            options: Any = {
                "base_url": base_url, "api_key": session["api_key"], "max_retries": RETRIES, "timeout": 60,
            }  # fmt: skip
            try:
                if agent in SYNC:
                    with openai.OpenAI(**options) as client:
                        await asyncio.to_thread(agent, session, client)
                else:
                    async with openai.AsyncOpenAI(**options) as client:
                        await agent(session, client)
            except Exception as error:
                if stop.is_set():
                    return
                done.append(f"{agent.__name__} failed: {error!r}")
                await _end(options, {"drop": repr(error)[:500]})
                continue
            await _end(options, {"reward": len(done) % 5} if style % 2 else {})
            done.append(agent.__name__)
            while not stop.is_set() and not {each.__name__ for each in (*SYNC, *ASYNC)} <= set(done):
                await asyncio.sleep(0.05)  # the quick ones leave tasks to the others, until each has done one


async def _end(options: Any, body: dict[str, Any]) -> None:
    async with openai.AsyncOpenAI(**options) as client:
        try:
            await client.post("/sessions/current/end", cast_to=object, body=body)
        except openai.APIError:
            return  # it has ended: the first word was heard, its answer was not
