"""Answers in the form of the responses API, whole and as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from actors.episode.endpoint.bodies import ResponsesBody
from actors.episode.endpoint.formats import Reading, Token, chat_logprobs
from actors.episode.endpoint.session import Exchange, Session
from actors.episode.endpoint.tool_calls import Call, Text
from actors.episode.endpoint.tree import Node


class _Items:
    """The items of a response: a message if there is text, and the calls."""

    def __init__(self, body: ResponsesBody, session: Session, exchange: Exchange) -> None:
        self._body, self._session, self._number = body, session, exchange.number

    def _id(self, prefix: str, i: int = 0) -> str:
        return f"{prefix}_{self._session.response_id(self._number)}{i}"

    def message(self, text: str, tokens: list[Token], status: str) -> dict[str, Any]:
        content = [self.part(text, tokens)] if status != "in_progress" else []
        return {"id": self._id("msg"), "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, text: str, tokens: list[Token]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(tokens)}

    def logprobs(self, tokens: list[Token]) -> list[dict[str, Any]]:
        return chat_logprobs(tokens, self._body.top_logprobs) if self._body.wants_logprobs else []

    def call(self, i: int, call: Call, status: str) -> dict[str, Any]:
        return {
            "id": self._id("fc", i),
            "type": "function_call",
            "status": status,
            "call_id": self._session.call_id(self._number, 0, i),
            "name": call.name,
            "arguments": call.arguments if status != "in_progress" else "",
        }


def whole(body: ResponsesBody, session: Session, exchange: Exchange, node: Node) -> dict[str, Any]:
    """The `response` object."""
    reading = Reading(session.tokenizer.decode, exchange.question.stop, exchange.question.tools)
    piece = reading.push(node.answer.tokens.tolist(), node.answer.logprobs.tolist())
    reading.end()
    return _ended(body, session, exchange, node, reading, piece.tokens)


async def stream(body: ResponsesBody, session: Session, exchange: Exchange) -> AsyncIterator[dict[str, Any]]:
    """The events, as tokens come."""
    number = -1

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        return {"type": kind, "sequence_number": number, **fields}

    items = _Items(body, session, exchange)
    yield event("response.created", response=_response(body, session, exchange))
    yield event("response.in_progress", response=_response(body, session, exchange))
    reading = Reading(session.tokenizer.decode, exchange.question.stop, exchange.question.tools)
    all_tokens: list[Token] = []
    began = False  # the message
    calls = 0

    def told(events: list[Text | Call], tokens: list[Token]) -> list[dict[str, Any]]:
        nonlocal began, calls
        made = []
        text = "".join(e.text for e in events if isinstance(e, Text))
        if text:
            at = {"item_id": items.message("", [], "in_progress")["id"], "output_index": 0, "content_index": 0}
            if not began:
                began = True
                message = items.message("", [], "in_progress")
                made.append(event("response.output_item.added", output_index=0, item=message))
                made.append(event("response.content_part.added", **at, part=items.part("", [])))
            made.append(event("response.output_text.delta", **at, delta=text, logprobs=items.logprobs(tokens)))
        for call in (e for e in events if isinstance(e, Call)):
            pending.append((calls, call))
            calls += 1
        return made

    pending: list[tuple[int, Call]] = []
    async for _, tokens, logprobs in exchange.pieces():
        piece = reading.push(tokens, logprobs)
        all_tokens += piece.tokens
        for made in told(piece.events, piece.tokens):
            yield made
    (node,) = await exchange.nodes()
    for made in told(reading.end().events, []):
        yield made
    if not began and not pending:  # an answer without a word is a message too
        at = {"item_id": items.message("", [], "in_progress")["id"], "output_index": 0, "content_index": 0}
        began = True
        yield event("response.output_item.added", output_index=0, item=items.message("", [], "in_progress"))
        yield event("response.content_part.added", **at, part=items.part("", []))
    response = _ended(body, session, exchange, node, reading, all_tokens)
    if began:
        message = response["output"][0]
        part = message["content"][0]
        at = {"item_id": message["id"], "output_index": 0, "content_index": 0}
        yield event("response.output_text.done", **at, text=part["text"], logprobs=part["logprobs"])
        yield event("response.content_part.done", **at, part=part)
        yield event("response.output_item.done", output_index=0, item=message)
    for i, call in pending:
        index = i + began
        item = items.call(i, call, "completed")
        at = {"item_id": item["id"], "output_index": index}
        yield event("response.output_item.added", output_index=index, item=items.call(i, call, "in_progress"))
        yield event("response.function_call_arguments.delta", **at, delta=call.arguments)
        yield event("response.function_call_arguments.done", **at, name=call.name, arguments=call.arguments)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{response['status']}", response=response)


def _ended(
    body: ResponsesBody, session: Session, exchange: Exchange, node: Node, reading: Reading, tokens: list[Token]
) -> dict[str, Any]:
    cut = node.answer.finish == "length"
    status = "incomplete" if cut else "completed"
    items = _Items(body, session, exchange)
    output = [items.message(reading.content, tokens, status)] if reading.content or not reading.calls else []
    output += [items.call(i, call, "completed") for i, call in enumerate(reading.calls)]
    prompt, made = len(exchange.question.prompt_tokens), len(node.answer.tokens)
    return _response(body, session, exchange) | {
        "status": status,
        "output": output,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + made,
        },
    }


def _response(body: ResponsesBody, session: Session, exchange: Exchange) -> dict[str, Any]:
    return {
        "id": f"resp_{session.response_id(exchange.number)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "temperature": None,
        "top_p": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice,
        "tools": [{"type": "function", "strict": False, **tool.function.model_dump()} for tool in body.tools],
        "truncation": "disabled",
        "metadata": {},
        "usage": None,
    }
