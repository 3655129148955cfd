"""Answers in the form of text completions, whole and as a stream. Several prompts are several exchanges."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from actors.episode.endpoint.bodies import CompletionBody
from actors.episode.endpoint.formats import Reading, finish_reason, text_logprobs, usage
from actors.episode.endpoint.session import Exchange, Session
from actors.episode.endpoint.tool_calls import Text
from actors.episode.endpoint.tree import Node

STREAM_CHUNKS_MAX = 64  # that wait to be sent, of one request


def whole(body: CompletionBody, session: Session, asked: list[tuple[Exchange, list[Node]]]) -> dict[str, Any]:
    """The `text_completion` object."""
    choices, made, prompts = [], 0, 0
    for i, (exchange, nodes) in enumerate(asked):
        prompts += len(exchange.question.prompt_tokens)
        for node in nodes:
            made += len(node.answer.tokens)
            logprobs = None
            if body.logprobs is not None:
                reading = Reading(session.tokenizer.decode, exchange.question.stop, False)
                piece = reading.push(node.answer.tokens.tolist(), node.answer.logprobs.tolist())
                logprobs = text_logprobs(piece.tokens, body.logprobs)
            choices.append(_choice(i * body.n + node.choice, node.message["content"], logprobs, node.answer.finish))
    return {**_head(body, session, asked[0][0]), "choices": choices, "usage": usage(prompts, made)}


async def stream(body: CompletionBody, session: Session, exchanges: list[Exchange]) -> AsyncIterator[dict[str, Any]]:
    """The chunks, as tokens come."""
    head = _head(body, session, exchanges[0])
    chunks: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(STREAM_CHUNKS_MAX)

    async def read(i: int, exchange: Exchange) -> None:
        readings = [Reading(session.tokenizer.decode, exchange.question.stop, False) for _ in exchange.made]
        async for choice, tokens, logprobs in exchange.pieces():
            piece = readings[choice].push(tokens, logprobs)
            text = "".join(event.text for event in piece.events if isinstance(event, Text))
            told = text_logprobs(piece.tokens, body.logprobs) if body.logprobs is not None else None
            if text or told:
                await chunks.put(_choice(i * body.n + choice, text, told, None))
        for node in await exchange.nodes():
            rest = "".join(event.text for event in readings[node.choice].end().events if isinstance(event, Text))
            await chunks.put(_choice(i * body.n + node.choice, rest, None, node.answer.finish))

    async def read_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for i, exchange in enumerate(exchanges):
                    group.create_task(read(i, exchange))
        finally:
            await chunks.put(None)

    reading = asyncio.create_task(read_all())
    wants_usage = body.stream_options.include_usage
    try:
        while (choice := await chunks.get()) is not None:
            yield {**head, "choices": [choice], **({"usage": None} if wants_usage else {})}
        try:
            await reading
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if wants_usage:
            made = sum([len(node.answer.tokens) for exchange in exchanges for node in await exchange.nodes()])
            prompts = sum(len(e.question.prompt_tokens) for e in exchanges)
            yield {**head, "choices": [], "usage": usage(prompts, made)}
    finally:
        while not reading.done():  # it may wait for room
            reading.cancel()
            with contextlib.suppress(asyncio.QueueEmpty):
                chunks.get_nowait()
            await asyncio.sleep(0)


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish and finish_reason(finish, False),
    }


def _head(body: CompletionBody, session: Session, exchange: Exchange) -> dict[str, Any]:
    return {
        "id": f"cmpl-{session.response_id(exchange.number)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": None,
    }
