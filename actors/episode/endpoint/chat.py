"""Answers in the form of chat completions, whole and as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from actors.episode.endpoint.bodies import ChatBody
from actors.episode.endpoint.formats import Piece, Reading, chat_logprobs, finish_reason, usage
from actors.episode.endpoint.messages import kept
from actors.episode.endpoint.session import Exchange, Session
from actors.episode.endpoint.tool_calls import Text
from actors.episode.endpoint.tree import Node


def whole(body: ChatBody, session: Session, exchange: Exchange, nodes: list[Node]) -> dict[str, Any]:
    """The `chat.completion` object."""
    choices, made = [], 0
    for node in nodes:
        made += len(node.answer.tokens)
        message = {
            "role": "assistant",
            "content": node.message["content"] or (None if "tool_calls" in node.message else ""),
            "refusal": None,
        }
        if "tool_calls" in node.message:
            message["tool_calls"] = kept(node.message)["tool_calls"]
        logprobs = None
        if body.logprobs:
            reading = Reading(session.tokenizer.decode, exchange.question.stop, exchange.question.tools)
            piece = reading.push(node.answer.tokens.tolist(), node.answer.logprobs.tolist())
            logprobs = {"content": chat_logprobs(piece.tokens, body.top_logprobs), "refusal": None}
        choices.append(
            {
                "index": node.choice,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": finish_reason(node.answer.finish, "tool_calls" in node.message),
            }
        )
    return {
        **_head(body, session, exchange, "chat.completion"),
        "choices": choices,
        "usage": usage(len(exchange.question.prompt_tokens), made),
    }


async def stream(body: ChatBody, session: Session, exchange: Exchange) -> AsyncIterator[dict[str, Any]]:
    """The `chat.completion.chunk` objects, as tokens come."""
    head = _head(body, session, exchange, "chat.completion.chunk")
    wants_usage = body.stream_options.include_usage

    def chunk(choice: int, delta: dict[str, Any], finish: str | None = None, piece: Piece | None = None) -> Any:
        logprobs = None
        if body.logprobs and piece is not None and piece.tokens:
            logprobs = {"content": chat_logprobs(piece.tokens, body.top_logprobs), "refusal": None}
        made = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**head, "choices": [made], **({"usage": None} if wants_usage else {})}

    readings = [
        Reading(session.tokenizer.decode, exchange.question.stop, exchange.question.tools) for _ in exchange.made
    ]
    for choice in range(len(readings)):
        yield chunk(choice, {"role": "assistant", "content": "", "refusal": None})

    def told(choice: int, piece: Piece) -> list[Any]:
        chunks: list[Any] = []
        reading = readings[choice]
        before = len(reading.calls) - sum(not isinstance(event, Text) for event in piece.events)
        for event in piece.events:
            if isinstance(event, Text):
                delta: dict[str, Any] = {"content": event.text}
            else:
                call = {
                    "index": before,
                    "id": session.call_id(exchange.number, choice, before),
                    "type": "function",
                    "function": {"name": event.name, "arguments": event.arguments},
                }
                delta, before = {"tool_calls": [call]}, before + 1
            chunks.append(chunk(choice, delta, None, piece if not chunks else None))
        if not chunks and body.logprobs and piece.tokens:
            chunks.append(chunk(choice, {"content": ""}, None, piece))
        return chunks

    async for choice, tokens, logprobs in exchange.pieces():
        for made in told(choice, readings[choice].push(tokens, logprobs)):
            yield made
    nodes = await exchange.nodes()
    for node in nodes:
        for made in told(node.choice, readings[node.choice].end()):
            yield made
        yield chunk(node.choice, {}, finish_reason(node.answer.finish, bool(readings[node.choice].calls)))
    if wants_usage:
        total = sum(len(node.answer.tokens) for node in nodes)
        yield {**head, "choices": [], "usage": usage(len(exchange.question.prompt_tokens), total)}


def _head(body: ChatBody, session: Session, exchange: Exchange, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{session.response_id(exchange.number)}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": None,
        "service_tier": None,
    }
