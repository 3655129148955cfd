"""From tokens to text while they come: whole characters only, and never a part of what ends the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]


class Detokeniser:
    """Gives the text that each token adds.

    Of the tokens that share a character all but the last add nothing; a character that never ends is told by `end`, as
    the replacement character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []  # a word's beginning shows only behind another word, so the last piece stays in it
        self._known = 0

    def push(self, token: int) -> str:
        """The text that `token` adds."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith("\ufffd"):
            return ""
        return self._told(text)

    def end(self) -> str:
        """The text of tokens that wait for others."""
        return self._told(self._decode(self._window)) if self._known < len(self._window) else ""

    def _told(self, text: str) -> str:
        new = text[len(self._decode(self._window[: self._known])) :] if self._known else text
        if new:  # tokens without text, as special ones are, are no beginning to stand behind
            self._window, self._known = self._window[self._known :], len(self._window) - self._known
        return new


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
