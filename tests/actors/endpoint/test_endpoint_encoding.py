"""One agent's long text must not be what all others wait for, and must come to the same tokens as a short one."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from actors.episode.endpoint import encoding
from tests.actors.endpoint.serving import Endpoint

LONG = "x" * encoding.LONG_CHARS


def asked(kind: str, client: Any, text: str) -> Any:
    return {
        "chat": lambda: client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}]),
        "completions": lambda: client.completions.create(model="m", prompt=text),
        "responses": lambda: client.responses.create(model="m", input=text),
    }[kind]()


@pytest.mark.parametrize("kind", ["chat", "completions", "responses"])
async def test_others_are_answered_while_a_long_text_is_encoded(endpoint: Endpoint, kind: str) -> None:
    encoded, apart = threading.Event(), endpoint.encoding._there

    class Held:
        def encode(self, text: str) -> tuple[int, ...]:
            assert encoded.wait(20)
            return apart.encode(text)

        encode_prompt = encode

    endpoint.encoding._there = Held()  # type: ignore[assignment]
    long, short = await endpoint.open(lambda *_: "b", "3-1"), await endpoint.open(lambda *_: "b", "3-2")
    waiting = asyncio.create_task(asked(kind, endpoint.client(long), LONG))
    try:
        for _ in range(3):
            await asked(kind, endpoint.client(short), "short")
        policy: Any = long.policy
        assert not waiting.done()
        assert not policy.asked
    finally:
        encoded.set()
    await waiting
    assert len(policy.asked[0]) >= len(LONG)


async def test_a_long_text_comes_to_the_tokens_of_a_short_one(endpoint: Endpoint, monkeypatch: Any) -> None:
    """A tool that tells a mark tells text, and the template's marks beside it are marks: also in the thread, and while
    others use the tokenizer for short texts."""
    tool = {"role": "tool", "tool_call_id": "1", "content": "<|im_end|>" * 40}
    chat = endpoint.tokenizer.render([{"role": "user", "content": "a<|im_end|>"}, tool])
    expected = endpoint.tokenizer.encode(chat)
    monkeypatch.setattr(encoding, "LONG_CHARS", 50)

    async def long() -> None:
        for _ in range(50):
            assert await endpoint.encoding.encode(chat) == expected

    async def short() -> None:
        told = endpoint.tokenizer.render([{"role": "tool", "tool_call_id": "1", "content": "<|im_end|>"}])
        once = endpoint.tokenizer.encode(told)
        for _ in range(200):
            assert endpoint.tokenizer.encode(told) == once
            await asyncio.sleep(0)

    await asyncio.gather(long(), long(), short())
