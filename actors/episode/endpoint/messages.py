"""Chat messages in one form: checked, with text as content, and told apart by what an agent cannot help changing.

An agent sends the answers that it got back in its own spelling: with or without blanks around them, null or "" as the
content, other keys for the same arguments. `fingerprint` does not see such differences.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from actors.episode.endpoint.errors import bad

ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text")


def read_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a request as templates take them. Raises `ApiError`."""
    return [_message(message, f"messages.{i}") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad(f"{where}.role: it must be one of {', '.join(ROLES)}", f"{where}.role")
    read: dict[str, Any] = {"role": ROLES[role], "content": text_of(message.get("content"), f"{where}.content")}
    if ROLES[role] == "assistant" and (calls := message.get("tool_calls")):
        if not isinstance(calls, list):
            raise bad(f"{where}.tool_calls: it must be a list", f"{where}.tool_calls")
        read["tool_calls"] = [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    return read


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: text, or a list of parts of text. Raises `ApiError`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{where}: it must be text or a list of parts", where)
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise bad(f"{where}.{i}: only parts of text are served, not {str(kind)[:80]!r}", f"{where}.{i}")
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f"{where}.function.name: it must be text", where)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise bad(f"{where}.function.arguments: they must be a JSON object", where) from None
    if not isinstance(arguments, dict):
        raise bad(f"{where}.function.arguments: they must be a JSON object", where)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def read_items(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `input` of the responses API as chat messages. Raises `ApiError`.

    A message of the assistant and the calls that follow it were one answer, and are one message again.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input.{i}"
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "message":
            messages.append(_message(item, where))
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "function": {name: item.get(name) for name in ("name", "arguments")}}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_call(call, where))
        elif kind == "function_call_output":
            content = text_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "content": content, "tool_call_id": str(item.get("call_id") or "")})
        else:
            raise bad(f"{where}.type: {str(kind)[:80]!r} is not served", f"{where}.type")
    return messages


def kept(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the API and the log have it: arguments are JSON as text, for they may be nested as deep, and their
    numbers as large, as a model likes."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
        for call in message["tool_calls"]
        for arguments in [call["function"]["arguments"]]
    ]
    return {**message, "tool_calls": calls}


def read_kept(message: dict[str, Any]) -> dict[str, Any]:
    """What `kept` was made of."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def fingerprint(before: str, message: dict[str, Any]) -> str:
    """What a conversation is known by that goes on from `before` with `message`."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    return digest([before, message["role"], content, message.get("name", ""), calls])


def digest(value: Any) -> str:
    """A short name of plain data."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
