"""Turns out, answers in: how episodes ask the model over the log.

An answer that stands in the log already is taken from there: an episode that runs again after its worker was killed is
answered at once as far as it asks the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import structlog

from bus.port import Bus
from bus.table import ANSWERS, TURNS
from schemas import Answer, MalformedMessage, Turn

log = structlog.get_logger()

ASK_AGAIN_S = 10.0  # after which the log is looked at again for an answer that was not heard

OnTokens: TypeAlias = Callable[[int, int, tuple[int, ...], tuple[float, ...]], None]  # choice, start, both for each


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """An answer; `reused`: it stood in the log. `elsewhere`: at its place the log had a turn that asked otherwise."""

    answer: Answer
    reused: bool
    elsewhere: bool


class Exchange:
    """One for a process. `start` and then `follow` must run beside whoever asks."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._name = name
        self.answered = 0
        """Answers that the log has been given since `start`, to whomever."""
        self._listening: dict[str, tuple[int, OnTokens]] = {}
        self._from = 1
        self._waiting: defaultdict[str, list[asyncio.Future[Answer]]] = defaultdict(list)

    @property
    def waiting(self) -> int:
        """Turns that are waited for."""
        return len(self._waiting)

    async def start(self) -> None:
        """Note where the answers end now: what comes behind is heard, what stands before is looked up."""
        self._from = (await self._bus.info(ANSWERS)).last_seq + 1

    async def follow(self) -> None:
        """Hear the answers, for ever."""
        async for entry in self._bus.read(ANSWERS, self._from):
            self.answered += 1
            if entry.id not in self._waiting:
                continue
            try:
                answer = entry.message()
            except MalformedMessage:
                continue
            assert isinstance(answer, Answer)
            for future in self._waiting.pop(entry.id, ()):
                if not future.done():
                    future.set_result(answer)

    async def hear(self) -> None:
        """Hear of the tokens that are being made, for ever. Anything may be lost on the way."""
        async for told in self._bus.told(self._name):
            listening = self._listening.get(str(told.get("turn")))
            start, new, logprobs = told.get("start"), told.get("tokens"), told.get("logprobs")
            if listening is None or not (isinstance(new, bytes) and isinstance(logprobs, bytes)):
                continue
            if isinstance(start, int) and len(new) == len(logprobs) and len(new) % 4 == 0:
                choice, on_tokens = listening
                try:
                    tokens = tuple(np.frombuffer(new, "<i4").tolist())
                    on_tokens(choice, start, tokens, tuple(np.frombuffer(logprobs, "<f4").tolist()))
                except Exception as error:  # somebody else's, and not worth the turn
                    del self._listening[str(told["turn"])]
                    log.warning("listener_failed", turn=told["turn"], error=repr(error))

    async def _known(self, turn: Turn) -> Answer | None:
        """The first answer to a turn, if the log has one: what another life of the episode has gone on from."""
        entry = await self._bus.first(ANSWERS, turn.id)
        if entry is None:
            return None
        answer = entry.message()
        assert isinstance(answer, Answer)
        return answer

    async def _answer(self, turn: Turn, heard: asyncio.Future[Answer]) -> Answer:
        """The answer, once it is heard. The log is asked again, too: it may have had one that it did not show."""
        while not (await asyncio.wait([heard], timeout=ASK_AGAIN_S))[0]:
            known = await self._known(turn)
            if known is not None:
                return known
        return heard.result()

    async def ask(self, turn: Turn, on_tokens: OnTokens | None = None) -> Answered:
        """The answer to a turn, from the log or from a rollout worker. Waits as long as that takes.

        `on_tokens(choice, start, tokens, logprobs)` is called with tokens as they are made, from place `start` on. Some
        may never come, and what came may come again; what came stands on the log as a partial, so the answer keeps it.
        """
        if on_tokens is not None:
            turn = dataclasses.replace(turn, listener=self._name)
            self._listening[turn.id] = turn.choice, on_tokens
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[turn.id].append(future)
        try:
            known = await self._known(turn)
            if known is not None:
                return Answered(known, True, False)
            other = await self._bus.last(TURNS, turn.place)
            await self._bus.publish(turn)
            answer = await self._answer(turn, future)
            return Answered(answer, False, other is not None and other.id != turn.id)
        finally:
            if future in (left := self._waiting.get(turn.id, [])):
                left.remove(future)
            if not left:
                self._waiting.pop(turn.id, None)
                self._listening.pop(turn.id, None)
