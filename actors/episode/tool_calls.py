"""The common format of tool calls in text: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", re.DOTALL)
CALLS_MAX = 32  # in one answer; the rest is ignored


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. With an `error` the text was no call, and the model is told so."""

    name: str
    arguments: dict[str, Any]
    error: str = ""


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in an answer, in order, malformed ones with their error."""
    return [read_tool_call(found[1]) for found in _CALL.finditer(text)][:CALLS_MAX]


def read_tool_call(body: str) -> ToolCall:
    """The call that the text between the tags is, or why it is none."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the tool call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return ToolCall("", {}, 'a tool call is {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string of JSON
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        arguments, why = {}, "the arguments of a tool call are a map by name"
    else:
        why = ""
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half a surrogate pair has no bytes, and no tokens
        return ToolCall("", {}, "the tool call is no text that can be told")
    return ToolCall(name, arguments, why)
