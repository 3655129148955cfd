"""From text to tokens without holding up the event loop, which all episodes share."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

LONG_CHARS = 16_384  # of text that is encoded elsewhere: about 20 ms of work


class Encodes(Protocol):
    """What is needed of a tokenizer; `ops.text.HfTokenizer` is one."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text; nothing is added, special tokens in it are taken as such."""

    def encode_prompt(self, prompt: Any) -> tuple[int, ...]:
        """Token ids of a text as the beginning of a prompt."""


class Encoding:
    """Encodes short texts at once, and long ones in a thread, one after the other.

    The thread has a copy of the tokenizer: one that two threads use at a time may take special tokens for text, or text
    for special tokens, as the other one has just told it to.
    """

    def __init__(self, tokenizer: Encodes) -> None:
        self._here = tokenizer
        self._there: Encodes | None = None  # before the first long text
        self._thread = ThreadPoolExecutor(1, "encoding")

    async def encode(self, text: str) -> tuple[int, ...]:
        """As `Encodes.encode`."""
        return await self._encoded(text, lambda tokenizer: tokenizer.encode(text))

    async def encode_prompt(self, text: str) -> tuple[int, ...]:
        """As `Encodes.encode_prompt`."""
        return await self._encoded(text, lambda tokenizer: tokenizer.encode_prompt(text))

    async def _encoded(self, text: str, encoded: Callable[[Encodes], tuple[int, ...]]) -> tuple[int, ...]:
        if len(text) < LONG_CHARS:
            return encoded(self._here)
        if self._there is None:
            self._there = copy.deepcopy(self._here)
        return await asyncio.get_running_loop().run_in_executor(self._thread, encoded, self._there)

    def close(self) -> None:
        """End the thread, when it is done with what it is at."""
        self._thread.shutdown(wait=False, cancel_futures=True)
