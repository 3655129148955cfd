"""Conversations whose tokens are exactly those that the model said and was told.

Each prompt is the tokens before it and behind them the template's glue: what the chat template puts between an answer
and the next one, new messages included. The glue is found by rendering the whole conversation and taking what stands
behind the last answer. Where a template rewrites what was said, such as one that drops the thinking of earlier turns,
the prompt is rendered anew, and the trajectory begins another sequence there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from actors.episode.encoding import Encodes, Encoding
from actors.episode.exchange import OnTokens
from actors.episode.tool_calls import ToolCall, parse_tool_calls
from schemas import Answer, Finish

if TYPE_CHECKING:
    from actors.episode.policy import Policy

Message: TypeAlias = dict[str, Any]


MARK_CHARS_MAX = 200  # of a special token


class Spells(Protocol):
    """Tokens to text and back."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text; nothing is added, special tokens in it are taken as such."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text, without special tokens."""

    def spelling(self, token: int) -> str:
        """A token as text; special ones too."""


class Tokenizer(Spells, Encodes, Protocol):
    """What a conversation needs of a tokenizer; `ops.text.HfTokenizer` is it."""

    def quoted(self, text: str) -> str:
        """A text whose special tokens `encode` takes for text."""

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """Chat messages as text, by the model's chat template, ready for the answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """What the model said. `text` is without special tokens; `tool_calls` stand in it in the common format."""

    text: str
    tokens: tuple[int, ...]
    finish: Finish
    answer: Answer

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls in the text, in order, malformed ones too."""
        return parse_tool_calls(self.text)


class Conversation:
    """Begins with a prompt: text, to which everything is appended as text; or chat messages, by the template.

    `tokens` are all tokens so far, `messages` what was said after the prompt.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        encoding: Encoding,
        prompt: str | Sequence[Message],
        tools: Sequence[Message] = (),
    ) -> None:
        self.messages: list[Message] = []
        self.tokens: tuple[int, ...] = ()
        self._policy = policy
        self._tokenizer = tokenizer
        self._encoding = encoding
        self._prompt = prompt
        self._tools = tools
        self._told = ""  # the rendered conversation that the last answer is the answer to
        self._reply: Reply | None = None

    async def ask(
        self,
        said: str | Message | Sequence[Message] = (),
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_tokens: OnTokens | None = None,
    ) -> Reply:
        """Tell the model something, a user's text or messages, and let it answer. The first time it has the prompt.

        Raises `Bound` as `Policy.generate`; what was told then stays told.
        """
        await self.tell(said)
        [answer] = await self._policy.generate(
            self.tokens, max_new_tokens=max_new_tokens, stop=stop, on_tokens=on_tokens
        )
        reply = Reply(answer.text, tuple(answer.tokens.tolist()), answer.finish, answer)
        self.tokens += reply.tokens
        self.messages.append({"role": "assistant", "content": reply.text})
        self._reply = reply
        return reply

    async def tell(self, said: str | Message | Sequence[Message] = ()) -> None:
        """Append messages to the tokens. Once between two answers."""
        new = messages_of(said)
        if isinstance(self._prompt, str):
            if not self.tokens:
                self.tokens = await self._encoding.encode_prompt(self._prompt)
            for message in new:
                content = str(message["content"])
                told = self._tokenizer.quoted(content) if message.get("role") == "tool" else content
                self.tokens += await self._encoding.encode(told)
        else:
            told = self._tokenizer.render([*self._prompt, *self.messages, *new], self._tools)
            glue = self._glue(told)
            encoded = await self._encoding.encode(told if glue is None else glue)
            self.tokens = encoded if glue is None else self.tokens + encoded
            self._told = told
        self.messages.extend(new)

    def _glue(self, told: str) -> str | None:
        """What stands behind the last answer in the rendered conversation; None if that does not go on from it."""
        if self._reply is None or not told.startswith(self._told):
            return None
        rest, said = told[len(self._told) :], self._reply.text
        if not rest.startswith(said):  # many templates trim what was said
            rest, said = rest.lstrip(), said.strip()
            if not rest.startswith(said):
                return None
        rest = rest[len(said) :]
        # The model ended its turn as the template does, or it was cut, and the template ends it.
        ended = self._reply.finish == "stop" and self._reply.tokens
        return without_end(self._tokenizer, rest, self._reply.tokens[-1]) if ended else rest


def without_end(tokenizer: Spells, after: str, last: int) -> str:
    """What the template puts behind an answer whose last token is `last`, without that token where it begins with it.

    A mark of the template is never cut: behind an answer that `<` has stopped stands `<|im_end|>` whole.
    """
    end = tokenizer.spelling(last)
    if not end or not after.startswith(end):
        return after
    first = tokenizer.encode(after[:MARK_CHARS_MAX])[0]
    whole = first != last and tokenizer.decode([first]) == "" and len(tokenizer.spelling(first)) > len(end)
    return after if whole else after[len(end) :]


def messages_of(said: str | Message | Sequence[Message]) -> list[Message]:
    """Messages of what a person writes: a text is a user's."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    return [dict(said)] if isinstance(said, dict) else [dict(message) for message in said]
