"""The answers that a session got, and how they follow each other: from this its trajectory is made.

system, user -> A -> tool -> B          one sequence: prompt, A, what the tool said, B
                  -> user -> C          the agent took another way from A on: a sequence of its own, whose prompt
                                        ends where C begins; A is trained once, in the first
other system -> D                       the context was rewritten: a sequence of its own
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from schemas import Answer


@dataclass(eq=False, slots=True)
class Node:
    """One answer of the model: that with `choice` among those to one question, the `number`-th of the session.

    `prompt_tokens` is the whole prompt, which begins with the parent's prompt and answer. `heard`: the agent got it, so
    that it belongs to the trajectory. `known` is what a conversation that ends in it is known by.
    """

    number: int
    choice: int
    prompt_tokens: tuple[int, ...]
    answer: Answer
    parent: Node | None
    message: dict[str, Any]
    known: str
    text: str  # of prompt and answer, where the prompt was text
    new: list[dict[str, Any]] = field(default_factory=list)  # messages between the parent and this
    heard: bool = False
    reward: float | None = None

    def earn(self, reward: float) -> None:
        """Take a reward; whoever gives one has the answer."""
        self.reward, self.heard = reward, True

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.prompt_tokens, *self.answer.tokens.tolist())


class Tree:
    """All answers of a session, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], Node] = {}
        self._known: dict[str, Node] = {}
        self._texts: list[Node] = []

    def add(self, node: Node) -> Node:
        """Take an answer in."""
        self._nodes[node.number, node.choice] = node
        if node.known:
            self._known.setdefault(node.known, node)
        if node.text:
            self._texts.append(node)
        return node

    def at(self, number: int, choice: int) -> Node | None:
        """The answer with this number and choice."""
        return self._nodes.get((number, choice))

    def known(self, known: str) -> Node | None:
        """The answer that a conversation ends in."""
        return self._known.get(known)

    def longest_text(self, text: str) -> Node | None:
        """The answer that `text` goes on from, with all that was before it: that with the most text."""
        fitting = (node for node in self._texts if text.startswith(node.text))
        return max(fitting, key=lambda node: len(node.text), default=None)

    def longest_tokens(self, tokens: tuple[int, ...]) -> Node | None:
        """The answer that `tokens` go on from, with all that was before it."""
        fitting = (
            node
            for node in self._nodes.values()
            if len(node.prompt_tokens) + len(node.answer.tokens) < len(tokens)
            and tokens[: len(node.prompt_tokens)] == node.prompt_tokens
            and tokens[len(node.prompt_tokens) :][: len(node.answer.tokens)] == tuple(node.answer.tokens.tolist())
        )
        return max(fitting, key=lambda node: len(node.tokens), default=None)

    @property
    def heard(self) -> list[Node]:
        """The answers that the agent got, in order."""
        return [self._nodes[place] for place in sorted(self._nodes) if self._nodes[place].heard]


def messages_of(nodes: Iterable[Node]) -> list[dict[str, Any]]:
    """What was said in a session, for people: new messages and answers in the order in which they came."""
    said: list[dict[str, Any]] = []
    for node in nodes:
        said += [*node.new, node.message]
    return [{name: value for name, value in message.items() if name != "instructions"} for message in said]
