"""From text to tokens without holding up the event loop, which all sessions share."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from actors.episode.endpoint.prompt_text import ChatTokenizer

LONG_CHARS = 16_384  # of text that is encoded elsewhere: about 20 ms of work


class Encoding:
    """Encodes short texts at once, and long ones in a thread, one after the other.

    The thread has a copy of the tokenizer: one that two threads use at a time may take special tokens for text, or text
    for special tokens, as the other one has just told it to.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._here = tokenizer
        self._there = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "encoding")

    async def encode(self, text: str) -> tuple[int, ...]:
        """As `ChatTokenizer.encode`."""
        return await self._encoded(text, self._here.encode, self._there.encode)

    async def encode_prompt(self, text: str) -> tuple[int, ...]:
        """As `ChatTokenizer.encode_prompt`."""
        return await self._encoded(text, self._here.encode_prompt, self._there.encode_prompt)

    async def _encoded(
        self, text: str, here: Callable[[str], tuple[int, ...]], there: Callable[[str], tuple[int, ...]]
    ) -> tuple[int, ...]:
        if len(text) < LONG_CHARS:
            return here(text)
        return await asyncio.get_running_loop().run_in_executor(self._thread, there, text)

    def close(self) -> None:
        """End the thread, when it is done with what it is at."""
        self._thread.shutdown(wait=False, cancel_futures=True)
