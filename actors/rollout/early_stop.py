"""Giving up an answer that is hopeless: it repeats itself, can no longer finish, or the user's predicate says so.

Where an answer is cut follows from its tokens alone: prefixes whose length is a multiple of `every` are asked, shortest
first, and the first hopeless one is all that is kept, finish `length`, even if the answer had ended by the time that
anybody looked. So neither the speed of a machine nor a hand-over changes what is trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.rollout.config import Repetition, StopEarly
from actors.rollout.engine import Engine, Generation, Request
from schemas import UserError

LOOK_EVERY_S = 0.5

Predicate = Callable[[str], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Keep `length` tokens: the answer is hopeless from there, for this `reason`."""

    length: int
    reason: str


class EarlyStop:
    """Judges prefixes. `decode` turns tokens into text, `predicate(text)` is the user's, True for a hopeless one."""

    def __init__(
        self,
        config: StopEarly,
        max_new_tokens: int,
        decode: Callable[[Sequence[int]], str],
        predicate: Predicate | None = None,
    ) -> None:
        self.config = config
        self.max_new_tokens = max_new_tokens
        self.decode = decode
        self.predicate = predicate

    def cut(self, tokens: Sequence[int], checked: int = 0, max_new_tokens: int | None = None) -> Cut | None:
        """Where to cut an answer, or None; its first `checked` tokens were found hopeful before.

        `max_new_tokens` is its own bound, such as a turn's, in place of the recipe's. One that leaves no more than the
        budget's reserve knows no budget.

        Raises `UserError` if the predicate fails. It may take long: not for an event loop.
        """
        every, most = self.config.every, max_new_tokens or self.max_new_tokens
        end = min(len(tokens), most - 1)
        for length in range((checked // every + 1) * every, end + 1, every):
            if reason := self._reason(tokens[:length], most):
                return Cut(length, reason)
        return None

    def _reason(self, prefix: Sequence[int], most: int) -> str:
        config = self.config
        if config.repetition is not None and repeats(prefix, config.repetition):
            return "repetition"
        budget = config.budget
        late = budget is not None and len(prefix) >= most - budget.reserve > 0
        if not late and self.predicate is None:
            return ""
        text = self.decode(prefix)
        if budget is not None and late and budget.marker not in text:
            return "budget"
        return "predicate" if self.predicate is not None and self._asked(self.predicate, text) else ""

    def _asked(self, predicate: Predicate, text: str) -> bool:
        try:
            return bool(predicate(text))
        except Exception as error:
            raise UserError(
                f"rollout.stop_early.predicate failed with {type(error).__name__}: {error}.",
                "Mend the function: it gets the text of an unfinished answer and returns True if it is hopeless.",
            ) from error


def repeats(tokens: Sequence[int] | NDArray[np.int64], rule: Repetition) -> bool:
    """Whether the tokens end in a unit of at most `rule.period` tokens, `rule.times` times and over `rule.tokens`."""
    array = np.asarray(tokens)
    for period in range(1, rule.period + 1):
        span = max(period * rule.times, rule.tokens)
        if span > len(array):
            if period * rule.times > len(array):
                return False
            continue
        tail = array[-span:]
        if np.array_equal(tail[period:], tail[:-period]):
            return True
    return False


@dataclasses.dataclass(eq=False)
class _Running:
    most: int  # tokens that the answer may have
    given_up: asyncio.Future[tuple[Generation, Cut]]
    checked: int = 0  # tokens that were found hopeful


class Guard:
    """An engine's `generate` that gives hopeless answers up. `watch` must run beside it."""

    def __init__(self, engine: Engine, early: EarlyStop) -> None:
        self._engine = engine
        self._early = early
        self._running: dict[str, _Running] = {}
        self.stopped = 0  # answers that were given up
        self.saved_tokens = 0  # that they were still allowed: what was saved, at most

    async def generate(self, request: Request) -> tuple[Generation, Cut | None, int]:
        """As `Engine.generate`; with the cut if the answer was given up, and how many tokens that saved, at most."""
        name, most = request.sample_id, request.sampling.max_new_tokens
        running = self._running[name] = _Running(most, asyncio.get_running_loop().create_future())
        generating = asyncio.ensure_future(self._engine.generate(request))
        try:
            first: list[asyncio.Future[Any]] = [generating, running.given_up]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if generating.done():
                generation, saved = generating.result(), 0
                if generation.finish is None:
                    return generation, None, 0
                cut = await asyncio.to_thread(self._early.cut, generation.tokens, running.checked, most)
            else:
                generation, cut = running.given_up.result()
                saved = most - len(generation.tokens)
        finally:
            generating.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # told above, if anybody is to know
                await generating
            if self._running.get(name) is running:  # else the same sample came a second time, and is watched for that
                del self._running[name]
        if cut is None:
            return generation, None, 0
        self.stopped += 1
        self.saved_tokens += saved
        return shortened(generation, cut.length), cut, saved

    async def watch(self) -> None:
        """Look at what runs, for ever. Raises `UserError` if the predicate fails."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for name, length in self._engine.lengths().items():
                running = self._running.get(name)
                if running is None or length - running.checked < self._early.config.every:
                    continue
                if (generation := self._engine.snapshot(name)) is None:
                    continue
                cut = await asyncio.to_thread(self._early.cut, generation.tokens, running.checked, running.most)
                if running.given_up.done() or self._running.get(name) is not running:
                    continue
                running.checked = len(generation.tokens)
                if cut is not None:
                    running.given_up.set_result((generation, cut))


def shortened(generation: Generation, length: int) -> Generation:
    """The first `length` tokens of a generation, as an answer that was cut."""
    segments: list[tuple[int, int]] = []
    left = length
    for version, count in generation.segments:
        if left > 0:
            segments.append((version, min(count, left)))
            left -= count
    return dataclasses.replace(
        generation,
        tokens=generation.tokens[:length],
        logprobs=generation.logprobs[:length],
        segments=tuple(segments),
        finish="length",
    )
