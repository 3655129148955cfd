"""What all formats of an answer share: names of ends, usage, logprobs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from actors.episode.endpoint.detokenise import Decode, Detokeniser, StopCut
from actors.episode.endpoint.tool_calls import Call, Event, Text, ToolCallParser


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its text, its log-probability when it was sampled, in nats, and where its text begins."""

    text: str
    logprob: float
    at: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What some new tokens add to an answer: events to tell, and the tokens themselves."""

    events: list[Event]
    tokens: list[Token]


class Reading:
    """Reads an answer's tokens, piece by piece or all at once: the same tokens make the same text and calls."""

    def __init__(self, decode: Decode, stop: tuple[str, ...], tools: bool) -> None:
        self._text = Detokeniser(decode)
        self._cut = StopCut(stop)
        self._calls = ToolCallParser() if tools else None
        self._length = 0
        self.read = 0  # tokens
        self.content = ""
        self.calls: list[Call] = []

    def push(self, tokens: list[int], logprobs: list[float]) -> Piece:
        """What more tokens add."""
        said: list[Token] = []
        told = ""
        for token, logprob in zip(tokens, logprobs, strict=True):
            text = self._text.push(token)
            said.append(Token(text, logprob if math.isfinite(logprob) else -9999.0, self._length))
            self._length += len(text)
            told += self._cut.push(text)
        self.read += len(tokens)
        return Piece(self._events(told), said)

    def end(self) -> Piece:
        """What was held back."""
        told = self._cut.push(self._text.end()) + self._cut.end()
        events = self._events(told)
        if self._calls is not None:
            events += self._taken(self._calls.end())
        return Piece(events, [])

    def _events(self, text: str) -> list[Event]:
        if self._calls is None:
            return self._taken([Text(text)] if text else [])
        return self._taken(self._calls.push(text))

    def _taken(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Text):
                self.content += event.text
            else:
                self.calls.append(event)
        return events


def finish_reason(finish: str, calls: bool) -> str:
    """Why an answer ended, in OpenAI's words."""
    return "length" if finish == "length" else "tool_calls" if calls else "stop"


def chat_logprobs(tokens: list[Token], top: int) -> list[dict[str, Any]]:
    """Of chat and responses: each token's; of the likeliest only the one that was sampled is known."""
    told = []
    for token in tokens:
        entry = {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode())}
        told.append(entry | {"top_logprobs": [dict(entry)] if top else []})
    return told


def text_logprobs(tokens: list[Token], top: int) -> dict[str, Any]:
    """Of completions."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{token.text: token.logprob} for token in tokens] if top else None,
        "text_offset": [token.at for token in tokens],
    }


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """Tokens of chat and completions."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
