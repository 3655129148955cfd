"""What stands between two answers: the part of a rendered chat that follows an answer of the model's.

An answer that comes back as a message is never rendered and tokenised again. Its message is rendered as a mark instead,
and what follows the mark is what the model has not seen yet: the end of its own turn, the new messages, and the words
that begin its next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from actors.episode.conversation import Spells, without_end
from actors.episode.encoding import Encodes
from schemas import UserError

MARK = "\u2063rollstream answer\u2063"  # invisible separators: no message holds it


class ChatTokenizer(Spells, Encodes, Protocol):
    """What the endpoint needs of the model's tokenizer; `ops.text.HfTokenizer` is it."""

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], **options: Any) -> str:
        """The chat by the model's template, ready for the next answer. Raises `UserError` for what it refuses."""


def text_after(
    tokenizer: ChatTokenizer,
    messages: Sequence[dict[str, Any]],
    answer: int,
    last_token: int | None,
    tools: Sequence[dict[str, Any]],
    options: dict[str, Any],
) -> str | None:
    """What follows the answer that `messages[answer]` is; None if the template does not let that be told.

    `last_token` is the answer's: where it is the end of the turn that the template writes too, it is not told twice.
    """
    marked = [*messages[:answer], {"role": "assistant", "content": MARK}, *messages[answer + 1 :]]
    try:
        text = tokenizer.render(marked, tools, **options)
    except UserError:  # a template that wants the calls of which tool messages are the results
        return None
    _, mark, after = text.rpartition(MARK)
    if not mark or text.count(MARK) != 1:
        return None
    return after if last_token is None else without_end(tokenizer, after, last_token)
