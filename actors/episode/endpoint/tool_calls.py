"""Tool calls in a model's text as it comes: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`.

One parser reads whole answers and streams, so both say the same. What is no valid call stays text, tags and all: the
agent sees what the model wrote.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeAlias

from actors.episode.tool_calls import CLOSE, OPEN, read_tool_call


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of content."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the tool `name`; `arguments` is a JSON object as text."""

    name: str
    arguments: str


Event: TypeAlias = Text | Call


class ToolCallParser:
    """Turns text, piece by piece, into content and calls. Blanks next to a call belong to neither."""

    def __init__(self) -> None:
        self._held = ""  # not yet told: blanks, the beginning of a tag, or a call without its end
        self._after_call = False

    def push(self, text: str) -> list[Event]:
        """What is certain after `text`."""
        self._held += text
        events: list[Event] = []
        while True:
            before, tag, rest = self._held.partition(OPEN)
            if not tag:
                return events + self._content(len(self._held) - _undecided(self._held))
            body, end, rest = rest.partition(CLOSE)
            if not end:
                return events + self._content(len(before.rstrip()))
            call = read_call(body)
            if call is None:
                events += self._content(len(before) + len(OPEN) + len(body) + len(CLOSE))
                continue
            events += self._content(len(before.rstrip()))
            events.append(call)
            self._held, self._after_call = rest, True

    def end(self) -> list[Event]:
        """The rest. A last call may lack its closing tag, where the model ended at once."""
        before, tag, body = self._held.partition(OPEN)
        call = read_call(body) if tag else None
        if call is None:
            whole = len(self._held.rstrip()) if self._after_call else len(self._held)
            return self._content(whole)
        return [*self._content(len(before.rstrip())), call]

    def _content(self, length: int) -> list[Event]:
        told, self._held = self._held[:length], self._held[length:]
        if self._after_call:
            told = told.lstrip()
            if not told:
                return []
            self._after_call = False
        return [Text(told)] if told else []


def _undecided(text: str) -> int:
    """How many characters at the end may still turn out to lead to a call: blanks and the beginning of its tag."""
    tag = next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:n])), 0)
    stem = text[: len(text) - tag]
    return tag + len(stem) - len(stem.rstrip())


def read_call(body: str) -> Call | None:
    """The call that the text between the tags is; None if it is none."""
    call = read_tool_call(body)
    if call.error or not call.name:
        return None
    try:
        text = json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:  # NaN, or half a surrogate pair
        return None
    return Call(call.name, text)


def parse(text: str) -> tuple[str, list[Call]]:
    """Content and calls of a whole answer."""
    parser = ToolCallParser()
    events = [*parser.push(text), *parser.end()]
    content = "".join(event.text for event in events if isinstance(event, Text))
    return content, [event for event in events if isinstance(event, Call)]
