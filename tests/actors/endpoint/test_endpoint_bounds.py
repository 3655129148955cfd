"""Whatever is sent, the answer is one that OpenAI's clients understand: never a crash, never a hang, never a 500."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.episode.endpoint import server
from actors.episode.endpoint.bodies import ChatBody, CompletionBody, ResponsesBody, read_body
from actors.episode.endpoint.errors import ApiError
from actors.episode.endpoint.session import Session
from ops.text import HfTokenizer
from tests.actors.endpoint.serving import Endpoint

USER: Any = [{"role": "user", "content": "a"}]
PATHS = ("chat/completions", "completions", "responses", "rewards", "sessions", "sessions/current/end")


async def post(endpoint: Endpoint, path: str, raw: Any, key: str) -> tuple[int, dict[str, Any], Any]:
    async with aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(20)
        async with http.post(f"{endpoint.url}/{path}", data=raw, headers=headers, timeout=timeout) as answer:
            return answer.status, await answer.json(content_type=None), answer.headers


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ("chat/completions", {"messages": USER, "n": 0}, "n"),
        ("chat/completions", {"messages": USER, "n": "2"}, "n"),
        ("chat/completions", {"messages": USER, "stop": [""]}, "stop"),
        ("chat/completions", {"messages": USER, "max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"messages": USER, "logit_bias": {"5": 3}}, "logit_bias"),
        ("chat/completions", {"messages": USER, "response_format": {"type": "json_object"}}, "prompt"),
        ("chat/completions", {"messages": USER, "tempurature": 1}, "tempurature"),
        ("chat/completions", {"messages": USER, "tools": [{"type": "web_search"}]}, "tools"),
        ("chat/completions", {"messages": USER, "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ("chat/completions", {"messages": USER, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "JSON"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": "", "n": 1}, "no tokens"),
        ("completions", {"prompt": [-5]}, "prompt"),
        ("completions", {"prompt": "a", "echo": True}, "echo"),
        ("completions", {"prompt": ["a"] * 257}, "prompt"),
        ("completions", {"prompt": [[1]] * 257}, "prompt"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"role": "user", "content": ""}] * 10_001}, "input"),
        ("responses", {"input": [{"type": "web_search_call"}]}, "web_search_call"),
        ("responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        ("rewards", {"reward": "much"}, "reward"),
        ("rewards", {"reward": 1e39}, "reward"),
        ("rewards", {"reward": 1, "response": "x"}, "response"),
    ],
)
async def test_a_request_that_is_wrong_is_told_what(
    endpoint: Endpoint, path: str, fields: dict[str, Any], word: str
) -> None:
    session = await endpoint.open(lambda prompt, choice: "b")
    status, body, _ = await post(endpoint, path, json.dumps(fields).encode(), session.key)
    assert status == 400, body
    assert word in body["error"]["message"], body
    assert body["error"]["type"] == "invalid_request_error"


async def test_bodies_that_are_no_json_or_too_large_are_refused(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "b")
    for raw in (b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"messages": NaN}', b"1" * 5000):
        status, body, _ = await post(endpoint, "chat/completions", raw, session.key)
        assert (status, body["error"]["code"]) == (400, "invalid_json"), raw[:20]
    status, body, _ = await post(endpoint, "chat/completions", io.BytesIO(b"x" * (9 << 20)), session.key)
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    status, body, _ = await post(endpoint, "nothing", b"", session.key)
    assert (status, body["error"]["code"]) == (404, "not_found")


async def test_keys_that_are_none_are_refused(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "b")
    for key in (
        "",
        "sk-none",
        session.key[:-1] + ("0" if session.key[-1] != "0" else "1"),
        session.key.replace("3-1", "3-2"),
    ):
        status, body, _ = await post(endpoint, "chat/completions", b'{"messages": [{"role": "user"}]}', key)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_sampling_is_the_recipes_and_whoever_asks_otherwise_is_told(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "b")
    create = endpoint.client(session).chat.completions.with_raw_response.create
    told = await create(model="m", messages=USER, temperature=0.2, top_p=1, seed=4, user="me", tool_choice="required")
    assert told.headers["x-rollstream-unheeded"] == "temperature, seed, tool_choice"
    assert "x-rollstream-unheeded" not in (await create(model="m", messages=USER, temperature=1)).headers


@pytest.mark.parametrize("endpoint", [{"requests_max": 1, "wait_s": 0.1}], indirect=True)
async def test_a_client_waits_for_room_as_long_as_it_is_told(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "b")
    policy: Any = session.policy
    policy.hold = asyncio.Event()
    first = asyncio.create_task(endpoint.client(session).chat.completions.create(model="m", messages=USER))
    while not policy.asked:
        assert not first.done(), first
        await asyncio.sleep(0.01)
    body = json.dumps({"messages": USER}).encode()
    status, told, headers = await post(endpoint, "chat/completions", body, session.key)
    assert (status, told["error"]["type"], headers["Retry-After"]) == (429, "rate_limit_error", "1")
    asyncio.get_running_loop().call_later(0.3, policy.hold.set)
    second = await endpoint.client(session, max_retries=2).chat.completions.create(model="m", messages=USER)
    assert second.choices[0].message.content == "b"
    await first


@pytest.mark.parametrize("endpoint", [{"requests_max": 1, "wait_s": 0.1}], indirect=True)
async def test_who_was_turned_away_is_answered_anew_and_not_with_the_answer_to_another(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "b")
    policy: Any = session.policy
    policy.hold = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, policy.hold.set)
    create = endpoint.client(session, max_retries=5).chat.completions.create
    answers = await asyncio.gather(*(create(model="m", messages=USER) for _ in range(3)))  # the best of three, say
    assert len({answer.id for answer in answers}) == len(policy.asked) == 3
    status, _, _ = await post(endpoint, "chat/completions", b'{"messages": [{"role": "user"}]}', session.key)
    assert status == 200  # as much room as before


async def test_requests_that_are_alike_and_lost_together_get_their_own_answers(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "b")
    policy: Any = session.policy
    policy.hold = asyncio.Event()
    create = endpoint.client(session, timeout=0.3).chat.completions.create
    lost = await asyncio.gather(*(create(model="m", messages=USER) for _ in range(2)), return_exceptions=True)
    assert all(isinstance(error, openai.APITimeoutError) for error in lost)
    asyncio.get_running_loop().call_later(0.3, policy.hold.set)
    create = endpoint.client(session).chat.completions.create
    again = {"x-stainless-retry-count": "1"}
    answers = await asyncio.gather(*(create(model="m", messages=USER, extra_headers=again) for _ in range(2)))
    assert (len({answer.id for answer in answers}), len(policy.asked)) == (2, 2)


async def test_a_body_is_read_from_those_only_who_have_a_key_and_while_it_comes(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.3)
    session = await endpoint.open(lambda prompt, choice: "b")
    for key, status in (("sk-none", b"401"), (session.key, b"408")):
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\nAuthorization: Bearer {key}"
        writer.write(head.encode() + b'\r\n\r\n{"messages"')
        line = await asyncio.wait_for(reader.readline(), 10)
        assert line.split()[1] == status
        writer.close()


async def test_a_client_that_takes_nothing_loses_its_place(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SLOW_S", 0.3)
    text = "x" * 4000
    session = await endpoint.open(lambda prompt, choice: text)
    body = json.dumps({"messages": USER, "stream": True, "logprobs": True, "n": 64})
    _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\nAuthorization: Bearer {session.key}\r\n\r\n{body}".encode())
    async with asyncio.timeout(100):
        while not session.open:
            await asyncio.sleep(0.01)
        while session.open:
            await asyncio.sleep(0.05)
    writer.close()


async def test_a_session_that_has_gone_for_a_while_is_waited_for(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "b")
    endpoint.registry._sessions.clear()  # as after a restart
    with pytest.raises(openai.RateLimitError):
        await endpoint.client(session).chat.completions.create(model="m", messages=USER)
    asyncio.get_running_loop().call_later(0.05, lambda: back.append(asyncio.ensure_future(open_again())))
    back: list[asyncio.Future[None]] = []

    async def open_again() -> None:
        await endpoint.registry.open(session, offered=False)

    answer = await endpoint.client(session).chat.completions.create(model="m", messages=USER)
    assert answer.choices[0].message.content == "b"


WORDS = (
    "messages", "prompt", "input", "tools", "stop", "n", "stream", "logprobs", "role", "content", "type", "text",
    "tool_calls", "function", "name", "arguments", "user", "assistant", "tool", "function_call", "call_id", "output",
    "max_tokens", "tool_choice", "instructions", "previous_response_id", "stream_options", "include", "reward", "drop",
)  # fmt: skip
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 40) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
TOP = ("messages", "prompt", "input", "tools", "stop", "n", "logprobs", "reward", "drop")
BODIES = st.fixed_dictionaries({}, optional=dict.fromkeys(TOP, VALUES))


@given(st.sampled_from(PATHS), BODIES)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_no_body_is_answered_by_a_fault_of_ours(tokenizer: HfTokenizer, path: str, fields: dict[str, Any]) -> None:
    async def try_it() -> None:
        endpoint = Endpoint(tokenizer, wait_s=0.05)
        endpoint.port = await endpoint.server.start("127.0.0.1", 0)
        try:
            session: Session = await endpoint.open(lambda prompt, choice: "b")
            status, _, _ = await post(endpoint, path, json.dumps(fields | {"stream": False}).encode(), session.key)
            assert status < 500, (path, fields)
            await session.close()
        finally:
            await endpoint.server.close()

    asyncio.run(try_it())


@given(st.sampled_from([ChatBody, CompletionBody, ResponsesBody]), VALUES)
@settings(max_examples=300, deadline=None)
def test_a_body_is_read_or_refused(kind: Any, fields: Any) -> None:
    refused: ApiError | None = None
    try:
        read_body(kind, json.dumps(fields).encode())
    except ApiError as error:
        refused = error
    assert refused is None or (400 <= refused.status < 500 and refused.message)
