"""Looks at turns while they are made: tells who listens of their tokens, and ends them at the strings that they name.

Where a string ends an answer follows from its tokens alone: the shortest prefix whose text holds one of the strings is
kept, even if the answer went on until somebody looked. So neither the speed of a machine nor a hand-over changes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

import numpy as np

from actors.rollout.early_stop import Cut, shortened
from actors.rollout.engine import Engine, Generation
from actors.rollout.turns import partial_of
from bus.port import Bus
from schemas import Turn

LOOK_EVERY_S = 0.05
TOLD_SHARE = 256  # an answer that was told as far as n tokens is told again n / 256 tokens further on
MARGIN_TOKENS = 16  # before the new ones, beside those that a string can span, when it is looked for

Decode: TypeAlias = Callable[[Sequence[int]], str]
Outcome: TypeAlias = tuple[Generation, Cut | None, int]


def stop_of(tokens: Sequence[int], strings: Sequence[str], decode: Decode) -> tuple[int, str] | None:
    """How many tokens complete the first of the strings in the text, and which; None if it holds none of them."""

    def found(length: int) -> bool:
        text = decode(tokens[:length])
        return any(string in text for string in strings)

    if not strings or not found(len(tokens)):
        return None
    length = bisect_left(range(1, len(tokens) + 1), True, key=found) + 1
    text = decode(tokens[:length])
    _, string = min((text.index(string), string) for string in strings if string in text)
    return length, string


@dataclasses.dataclass(eq=False)
class _Running:
    turn: Turn
    stopped: asyncio.Future[Generation]
    told: int = 0
    looked: int = 0

    @property
    def looks_from(self) -> int:
        """Where a string that ends it may begin that was not seen yet."""
        return max(0, self.looked - max(map(len, self.turn.stop)) - MARGIN_TOKENS)


class TurnWatch:
    """`watch` must run beside whoever generates. Without a `bus` nobody listens."""

    def __init__(self, bus: Bus | None, engine: Engine, decode: Decode, name: str) -> None:
        self._bus = bus
        self._name = name
        self._engine = engine
        self._decode = decode
        self._running: dict[str, _Running] = {}
        self._begun = asyncio.Event()

    async def generate(self, turn: Turn, generating: Coroutine[Any, Any, Outcome]) -> Outcome:
        """The outcome of generating a turn, ended by its strings: then its cut has the string for a reason."""
        if not turn.stop and not turn.listener:
            return await generating
        running = self._running[turn.id] = _Running(turn, asyncio.get_running_loop().create_future())
        self._begun.set()
        task = asyncio.ensure_future(generating)
        try:
            either: tuple[asyncio.Future[Any], ...] = (task, running.stopped)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            generation, cut, saved = task.result() if task.done() else (running.stopped.result(), None, 0)
        finally:
            del self._running[turn.id]
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # told above, if anybody is to know
                await task
        if generation.finish is None and not running.stopped.done():  # handed over
            return generation, cut, saved
        stop = await asyncio.to_thread(stop_of, generation.tokens, turn.stop, self._decode)
        if stop is None:
            return generation, cut, saved
        ended = dataclasses.replace(shortened(generation, stop[0]), finish="stop")
        return ended, Cut(*stop), 0

    async def watch(self) -> None:
        """Look at what runs, for ever."""
        while True:
            if not self._running:
                self._begun.clear()
                await self._begun.wait()
            await asyncio.sleep(LOOK_EVERY_S)
            lengths = self._engine.lengths()
            for name, running in list(self._running.items()):
                if running.turn.listener and lengths.get(name, 0) - running.told > running.told // TOLD_SHARE:
                    await self._tell(running)
            stoppable = [running for running in self._running.values() if running.turn.stop]
            starts = {running.turn.id: running.looks_from for running in stoppable}
            for name, tokens in self._engine.tokens(starts).items():
                self._look(self._running[name], starts[name], tokens)

    async def _tell(self, running: _Running) -> None:
        turn = running.turn
        if self._bus is None or (generation := self._engine.snapshot(turn.id)) is None:
            return
        # What somebody has read cannot be taken back: whoever goes on if this worker dies must keep it. Each time that
        # is the whole prefix, so the steps grow with it: else the bytes grow with the square of the answer's length.
        await self._bus.publish(partial_of(generation, self._name))
        told = {
            "turn": turn.id,
            "start": running.told,
            "tokens": np.array(generation.tokens[running.told :], "<i4").tobytes(),
            "logprobs": np.array(generation.logprobs[running.told :], "<f4").tobytes(),
        }
        await self._bus.tell(turn.listener, told)
        running.told = len(generation.tokens)

    def _look(self, running: _Running, start: int, tokens: Sequence[int]) -> None:
        turn, count = running.turn, start + len(tokens)
        if count <= running.looked or running.stopped.done():
            return
        running.looked = count
        text = self._decode(tokens)
        if any(string in text for string in turn.stop) and (generation := self._engine.snapshot(turn.id)) is not None:
            running.stopped.set_result(generation)
