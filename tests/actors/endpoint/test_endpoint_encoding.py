"""One agent's long text must not be what all others wait for, and must come to the same tokens as a short one."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
import types
from typing import Any

import pytest

from actors.episode import encoding
from actors.episode.endpoint.asking import ask_texts
from actors.episode.endpoint.bodies import CompletionBody
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
    encoded, apart = threading.Event(), copy.deepcopy(endpoint.tokenizer)

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


async def longest_silence_s(work: asyncio.Future[Any]) -> float:
    """Of the loop, until the work is done."""
    last, longest = time.perf_counter(), 0.0
    while not work.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        last, longest = now, max(longest, now - last)
    await work
    return longest


async def test_the_thread_leaves_the_loop_its_turn(endpoint: Endpoint) -> None:
    """A tokenizer that did not let go of the interpreter would hold up the loop from its thread as well."""
    text = "hello wor " * 50_000
    for _ in range(5):  # a machine that is busy otherwise may be silent too, but not each time
        begun = time.perf_counter()
        here = endpoint.tokenizer.encode(text)
        alone_s = time.perf_counter() - begun
        there = asyncio.ensure_future(endpoint.encoding.encode(text))
        if await longest_silence_s(there) < alone_s / 2:
            assert there.result() == here
            return
    raise AssertionError(f"the loop was silent for more than half of the {alone_s:.2f} s that encoding takes")


async def test_many_short_texts_leave_others_their_turn(endpoint: Endpoint) -> None:
    session, most = await endpoint.open(lambda *_: "b"), 0
    encode_prompt, encoded = endpoint.tokenizer.encode_prompt, 0

    def counted(text: Any) -> tuple[int, ...]:
        nonlocal encoded
        encoded += 1
        return encode_prompt(text)

    endpoint.encoding._here = types.SimpleNamespace(encode_prompt=counted)  # type: ignore[assignment]
    body = CompletionBody.model_validate({"prompt": ["a"] * 64})
    asking = asyncio.create_task(ask_texts(body, session, 8))
    while not asking.done():
        before = encoded
        await asyncio.sleep(0)
        most = max(most, encoded - before)
    assert (len(await asking), encoded, most) == (64, 64, 1)
