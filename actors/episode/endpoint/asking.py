"""From a request's body to the question that it is in its session, with the model's own tokens where it goes on."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.episode.endpoint.bodies import Body, ChatBody, CompletionBody, ResponsesBody
from actors.episode.endpoint.errors import bad
from actors.episode.endpoint.messages import digest, fingerprint, read_items, read_messages
from actors.episode.endpoint.prompt_text import text_after
from actors.episode.endpoint.session import Question, Session
from actors.episode.endpoint.tree import Node
from schemas import UserError

NOT_A_TEMPLATES = {
    "messages", "tools", "tokenize", "add_generation_prompt", "conversation", "return_dict", "chat_template", "padding",
    "continue_final_message", "truncation", "max_length", "return_tensors", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}  # fmt: skip
"""Parameters of Transformers' `apply_chat_template` itself; all others are the template's."""


async def ask_chat(body: ChatBody, session: Session, limit: int) -> Question:
    """The question of a chat. Raises `ApiError`."""
    tools = [tool.for_template() for tool in body.tools] if body.tool_choice != "none" else []
    return await _asked(read_messages(body.messages), tools, body.chat_template_kwargs, body, session, limit)


async def ask_response(body: ResponsesBody, session: Session, limit: int) -> Question:
    """The question of the responses API. Raises `ApiError`."""
    messages = read_items(body.input)
    if body.previous_response_id is not None:
        exchange = session.exchange_of(body.previous_response_id)
        node = session.tree.at(exchange.number, 0)
        if node is None:
            raise bad("The previous response has not come yet.", "previous_response_id")
        messages = [m for m in conversation(node) if not m.get("instructions")] + messages
    if body.instructions:  # those of the response before do not hold on
        messages = [{"role": "system", "content": body.instructions, "instructions": True}, *messages]
    if not messages:
        raise bad("input: it must hold a message", "input")
    tools = [tool.for_template() for tool in body.tools] if body.tool_choice != "none" else []
    return await _asked(messages, tools, {}, body, session, limit)


def conversation(node: Node) -> list[dict[str, Any]]:
    """All messages that lead to an answer, and itself."""
    line: list[Node] = []
    at: Node | None = node
    while at is not None:
        line.append(at)
        at = at.parent
    return [message for node in reversed(line) for message in (*node.new, node.message)]


async def _asked(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    options: dict[str, Any],
    body: Body,
    session: Session,
    limit: int,
) -> Question:
    if not session.tokenizer.has_chat_template:
        raise bad(
            "The model's tokenizer has no chat template: send text to /v1/completions, or name a template in "
            "data.chat_template of the recipe.",
            code="no_chat_template",
        )
    known, parent, at = digest([tools, options]), None, -1
    for i, message in enumerate(messages):
        known = fingerprint(known, message)
        if message["role"] == "assistant" and (node := session.tree.known(known)) is not None:
            parent, at = node, i
    reserved = sorted(NOT_A_TEMPLATES & set(options))
    if reserved:
        raise bad(f"chat_template_kwargs: {reserved[0]} is not one of a template's own", "chat_template_kwargs")
    tokens: tuple[int, ...] | None = None
    shown = [{name: value for name, value in m.items() if name != "instructions"} for m in messages]
    if parent is not None:
        last = int(parent.answer.tokens[-1]) if len(parent.answer.tokens) else None
        after = text_after(session.tokenizer, shown, at, last, tools, options)
        if after is not None:
            tokens = (*parent.tokens, *await session.encoding.encode(after))
    if tokens is None:
        parent, at = None, -1
        try:
            rendered = session.tokenizer.render(shown, tools, **options)
        except UserError as error:
            raise bad(f"The model's chat template refuses these messages: {error.message[:500]}", "messages") from None
        tokens = await session.encoding.encode(rendered)
    return _question(tokens, parent, known, messages[at + 1 :], "", body, session, limit, bool(tools))


async def ask_texts(body: CompletionBody, session: Session, limit: int) -> list[Question]:
    """The questions of a completion, one for each prompt. Raises `ApiError`."""
    questions = []
    for prompt in body.prompts:
        questions.append(await _text_asked(prompt, body, session, limit))
        await asyncio.sleep(0)  # many short texts are as much work as a long one
    return questions


async def _text_asked(prompt: str | list[int], body: CompletionBody, session: Session, limit: int) -> Question:
    if isinstance(prompt, str):
        parent, tokens = await _gone_on(prompt, session)
        return _question(tokens, parent, "", [], prompt, body, session, limit, False)
    ids = tuple(prompt)
    if any(not 0 <= token < 1 << 31 for token in ids):
        raise bad("prompt: its token ids must be those of the model's tokenizer", "prompt")
    return _question(ids, session.tree.longest_tokens(ids), "", [], "", body, session, limit, False)


async def _gone_on(prompt: str, session: Session) -> tuple[Node | None, tuple[int, ...]]:
    """The answer that a text goes on from, if it does, and its tokens.

    What ended the answer, the text does not show. A stop string that the text repeats is the model's own. An end token
    that the text leaves out is not put back: the model's tokens before it are kept, in a sequence of their own.
    """
    encoding = session.encoding
    node = session.tree.longest_text(prompt)
    if node is None:
        return None, await encoding.encode_prompt(prompt)
    answer, rest = node.answer, prompt[len(node.text) :]
    if answer.finish == "length":
        return node, (*node.tokens, *await encoding.encode(rest))
    if answer.stopped and rest.startswith(answer.stopped):
        return node, (*node.tokens, *await encoding.encode(rest.removeprefix(answer.stopped)))
    if answer.stopped or not rest:
        return None, await encoding.encode_prompt(prompt)
    return None, (*node.tokens[:-1], *await encoding.encode(rest))


def _question(
    tokens: tuple[int, ...],
    parent: Node | None,
    known: str,
    new: list[dict[str, Any]],
    text: str,
    body: Body,
    session: Session,
    limit: int,
    tools: bool,
) -> Question:
    if not tokens:
        raise bad("The prompt has no tokens.", code="empty_prompt")
    asked = body.max_tokens_asked
    return Question(
        prompt_tokens=tokens,
        parent=parent,
        known=known,
        new=new,
        text=text,
        max_new_tokens=limit if asked is None else min(asked, limit),
        stop=tuple(body.stop),
        n=body.n,
        tools=tools,
        stream=body.stream,
    )
