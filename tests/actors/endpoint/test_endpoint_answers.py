"""OpenAI's own client must find what it finds elsewhere: whole answers and streams, text, tools, choices, logprobs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from actors.episode.policy import Bound
from tests.actors.endpoint.serving import Endpoint

USER: Any = [{"role": "user", "content": "2+3"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = 'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [3, "é"]}}\n</tool_call>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'  # noqa: E501


async def test_a_chat_is_answered_with_text_usage_and_the_logprobs_of_the_answer(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "5 ✓")
    answer = await endpoint.client(session).chat.completions.create(
        model="gpt-4o", messages=USER, logprobs=True, top_logprobs=1
    )
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason, answer.model) == ("5 ✓", "stop", "gpt-4o")
    policy: Any = session.policy
    [[said]] = policy.answers
    assert endpoint.tokenizer.text_of(policy.asked[0]) == "<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(policy.asked[0]), len(said.tokens))
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [token.logprob for token in choice.logprobs.content] == said.logprobs.tolist()
    assert "".join(token.token for token in choice.logprobs.content) == "5 ✓"
    assert choice.logprobs.content[0].top_logprobs[0].token == "5"


async def test_a_stream_says_the_same_as_the_whole_answer(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: CALLS)
    client = endpoint.client(session)
    whole = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS, n=2)
    stream = await client.chat.completions.create(
        model="m", messages=USER, tools=TOOLS, n=2, stream=True, stream_options={"include_usage": True}
    )
    content, calls, ends, usage = ["", ""], [[], []], [None, None], None  # type: ignore[var-annotated]
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content[choice.index] += choice.delta.content or ""
            calls[choice.index] += choice.delta.tool_calls or []
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert usage == whole.usage
    assert ends == ["tool_calls", "tool_calls"]
    for choice in whole.choices:
        assert content[choice.index] == choice.message.content == "Let me see."
        told = choice.message.tool_calls or []
        assert [(c.function.name, c.function.arguments) for c in calls[choice.index]] == [
            (c.function.name, c.function.arguments) for c in told if c.type == "function"
        ]
        assert [json.loads(c.function.arguments) for c in calls[choice.index]] == [{"a": 2, "b": [3, "é"]}, {}]


class Tokens(asyncio.Semaphore):
    """As many as a policy may say."""

    async def wait(self) -> None:
        await self.acquire()


async def test_a_stream_comes_while_the_answer_is_made_in_whole_characters(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "äö✓")
    policy: Any = session.policy
    policy.hold = tokens = Tokens(len("äö✓".encode()))  # and one more at the end
    stream = await endpoint.client(session).chat.completions.create(
        model="m", messages=USER, stream=True, logprobs=True
    )
    seen, before_end = [], 0
    async for chunk in stream:
        [choice] = chunk.choices
        if choice.delta.content:
            seen.append(choice.delta.content)
            before_end += session.tree.at(0, 0) is None
        if len(seen) == 3:
            tokens.release()
    assert seen == ["ä", "ö", "✓"]
    assert before_end == 3
    assert len(policy.asked) == 1


async def test_a_stop_string_ends_the_text_before_it_and_is_never_streamed_in_part(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "one\nObserve and more")
    client = endpoint.client(session)
    whole = await client.chat.completions.create(model="m", messages=USER, stop="\nObs")
    stream = await client.chat.completions.create(model="m", messages=USER, stop=["\nObs"], stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == text == "one"
    assert whole.choices[0].finish_reason == "stop"


async def test_an_answer_that_is_cut_says_so(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "a long answer")
    client = endpoint.client(session)
    chat = await client.chat.completions.create(model="m", messages=USER, max_completion_tokens=4)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("a lo", "length")
    response = await client.responses.create(model="m", input="2+3", max_output_tokens=4)
    assert (response.output_text, response.status) == ("a lo", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


async def test_completions_take_text_and_ids_one_and_many_whole_and_as_a_stream(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: f"{prompt}{choice}")
    client = endpoint.client(session)
    ids = list(endpoint.tokenizer.encode("cd"))
    one = await client.completions.create(model="m", prompt="ab", n=2, logprobs=1)
    assert [choice.text for choice in one.choices] == ["ab0", "ab1"]
    assert one.choices[0].logprobs is not None
    assert one.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    many = await client.completions.create(model="m", prompt=[ids, ids])
    assert [(choice.index, choice.text) for choice in many.choices] == [(0, "cd0"), (1, "cd0")]
    texts = {0: "", 1: "", 2: "", 3: ""}
    stream = await client.completions.create(model="m", prompt=["x", "y"], n=2, stream=True)
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "x0", 1: "x1", 2: "y0", 3: "y1"}


@pytest.mark.parametrize("said", ["5 ✓", CALLS, ""])
async def test_responses_stream_what_they_answer(endpoint: Endpoint, said: str) -> None:
    session = await endpoint.open(lambda prompt, choice: said)
    client = endpoint.client(session)
    tools: Any = [{"type": "function", "name": "add", "parameters": {}, "strict": False}]
    whole = await client.responses.create(model="m", input="2+3", instructions="Add.", tools=tools)
    async with client.responses.stream(model="m", input="2+3", instructions="Add.", tools=tools) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text == ("Let me see." if said == CALLS else said)
    calls = [[i.arguments for i in r.output if i.type == "function_call"] for r in (whole, final)]
    assert calls[0] == calls[1] == ([json.dumps({"a": 2, "b": [3, "é"]}, ensure_ascii=False), "{}"] * (said == CALLS))
    assert [event.sequence_number for event in events if event.type == "response.created"] == [0]
    assert final.usage == whole.usage


async def test_a_response_goes_on_from_one_before_without_its_instructions(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "4")
    client = endpoint.client(session)
    first = await client.responses.create(model="m", input="2+2", instructions="Add.")
    await client.responses.create(model="m", input="and 5?", previous_response_id=first.id)
    policy: Any = session.policy
    assert endpoint.tokenizer.text_of(policy.asked[1]) == (
        "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nand 5?<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="m", input="x", previous_response_id="resp_none")


async def test_a_client_that_hangs_up_leaves_its_question_and_finds_it_when_it_asks_again(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "5")
    policy: Any = session.policy
    policy.hold = asyncio.Event()
    with pytest.raises(openai.APITimeoutError):
        await endpoint.client(session, timeout=0.2).chat.completions.create(model="m", messages=USER)
    asyncio.get_running_loop().call_later(0.5, policy.hold.set)
    answer = await endpoint.client(session).chat.completions.create(
        model="m", messages=USER, extra_headers={"x-stainless-retry-count": "1"}
    )
    assert answer.choices[0].message.content == "5"
    assert len(policy.asked) == 1
    await endpoint.client(session).chat.completions.create(model="m", messages=USER)
    assert len(policy.asked) == 2  # who asks anew is answered anew


async def test_an_answer_that_was_lost_on_its_way_is_given_again(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "5")
    policy: Any = session.policy
    client, again = endpoint.client(session), {"x-stainless-retry-count": "2"}
    first = await client.chat.completions.create(model="m", messages=USER)
    lost = await client.chat.completions.create(model="m", messages=USER, extra_headers=again)
    assert (lost.id, len(policy.asked)) == (first.id, 1)
    more = [*USER, first.choices[0].message, {"role": "user", "content": "sure?"}]
    await client.chat.completions.create(model="m", messages=more)
    anew = await client.chat.completions.create(model="m", messages=USER, extra_headers=again)
    assert (anew.id != first.id, len(policy.asked)) == (True, 3)  # the first was got: something was built on it


async def test_a_stream_has_no_line_ends_within_its_lines(endpoint: Endpoint) -> None:
    """Clients that split text into lines take these characters for line ends, which JSON does not escape."""
    said = "a\x85b\u2028c\u2029d\x0be"
    session = await endpoint.open(lambda prompt, choice: said)
    body = {"messages": USER, "stream": True}
    headers = {"Authorization": f"Bearer {session.key}"}
    async with (
        httpx.AsyncClient(timeout=20) as http,
        http.stream("POST", f"{endpoint.url}/chat/completions", json=body, headers=headers) as answer,
    ):
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == said


async def test_a_session_that_has_ended_is_not_asked_again(endpoint: Endpoint) -> None:
    session = await endpoint.open(lambda prompt, choice: "b")
    await session.end()
    with pytest.raises(openai.ConflictError) as refused:
        await endpoint.client(session, max_retries=3).chat.completions.create(model="m", messages=USER)
    assert refused.value.response.request.headers["x-stainless-retry-count"] == "0"


async def test_a_prompt_that_leaves_no_room_is_refused_before_a_stream_begins(endpoint: Endpoint) -> None:
    def say(prompt: str, choice: int) -> str:
        raise Bound("the prompt of 5 tokens leaves the model no room")

    session = await endpoint.open(say)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="no room"):
            await endpoint.client(session).chat.completions.create(model="m", messages=USER, stream=stream)
    assert session.bound
