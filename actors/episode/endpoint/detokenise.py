"""From tokens to text while they come: whole characters only, and never a part of what ends the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]


WAITING_MAX = 32  # tokens that may wait for the end of their character; none has so many
KEPT = 8  # of those whose character never came: more than what a last one may consist of


class Detokeniser:
    """Gives the text that each token adds.

    Of the tokens that share a character all but the last add nothing; a character that never ends is told by `end`, or
    once it is certain that it will not, as the replacement character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []  # a word's beginning shows only behind another word, so the last piece stays in it
        self._shown = 0  # characters of the window's text that were told
        self._waiting = 0  # tokens at its end that were not

    def push(self, token: int) -> str:
        """The text that `token` adds."""
        self._window.append(token)
        self._waiting += 1
        text = self._decode(self._window)
        new = text[self._shown :]
        if text.endswith("\ufffd"):
            if self._waiting < WAITING_MAX:
                return ""
            new = new[:-1]
            self._keep(KEPT)
            self._shown -= 1
        elif new:  # tokens without text, as special ones are, are no beginning to stand behind
            self._keep(self._waiting)
        elif self._waiting >= WAITING_MAX:
            del self._window[-self._waiting :]
            self._waiting = 0
        return new

    def end(self) -> str:
        """The text of tokens that wait for others."""
        return self._decode(self._window)[self._shown :] if self._waiting else ""

    def _keep(self, tokens: int) -> None:
        self._window = self._window[-tokens:]
        self._shown, self._waiting = len(self._decode(self._window)), 0


class StopCut:
    """Cuts text before the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What may be told after `text`."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            told, self._held = self._held[: min(found)], ""
            return told
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        told, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return told

    def end(self) -> str:
        """What was held back."""
        told, self._held = self._held, ""
        return told


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop`, as a whole longer, begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
