"""What an agent has read of an answer cannot be taken back, whatever dies; and the first stop string ends an answer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from actors.rollout import turn_watch
from actors.rollout.engine import Generation
from actors.rollout.turn_watch import TurnWatch, stop_of
from bus.memory import MemoryBus, MemoryHub
from bus.table import PARTIALS
from schemas import Partial, Turn

TURN = Turn(group_id=1, index=2, number=0, prompt_tokens=[7], stop=["bc"], seed=1, min_version=0, listener="episode-0")


def decode(tokens: Any) -> str:
    return "".join(chr(97 + token) for token in tokens)


class Engine:
    """Makes a token each time somebody looks."""

    def __init__(self) -> None:
        self.made = [0]

    def _grown(self) -> tuple[int, ...]:
        self.made.append((self.made[-1] + 1) % 4)
        return tuple(self.made)

    def lengths(self) -> dict[str, int]:
        return {TURN.id: len(self._grown())}

    def tokens(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {TURN.id: self._grown()[starts[TURN.id] :]}

    def snapshot(self, sample_id: str) -> Generation:
        made = self._grown()
        return Generation(sample_id, (7,), made, tuple(-token / 4 for token in made), ((3, len(made)),), None)


async def test_a_listener_is_told_of_nothing_that_does_not_stand_on_the_log() -> None:
    bus = MemoryBus("r", MemoryHub())
    await bus.connect()
    await bus.setup()
    engine: Any = Engine()
    watch = TurnWatch(bus, engine, decode, "rollout-0")
    heard: list[tuple[int, list[int], list[float], int]] = []

    async def listen() -> None:
        async for told in bus.told("episode-0"):
            entry = await bus.last(PARTIALS, TURN.id)
            assert entry is not None
            partial = entry.message()
            assert isinstance(partial, Partial)
            start, tokens = told["start"], np.frombuffer(told["tokens"], "<i4").tolist()
            assert partial.tokens.tolist()[start : start + len(tokens)] == tokens
            heard.append((start, tokens, np.frombuffer(told["logprobs"], "<f4").tolist(), len(partial.tokens)))

    async def for_ever() -> Any:
        await asyncio.Event().wait()

    listening = asyncio.create_task(listen())
    watching = asyncio.create_task(watch.watch())
    try:
        async with asyncio.timeout(20):
            generation, cut, _ = await watch.generate(TURN, for_ever())
            while not heard:
                await asyncio.sleep(0.01)
    finally:
        for task in (listening, watching):
            task.cancel()
        ended = await asyncio.gather(listening, watching, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
    assert cut is not None
    assert (decode(generation.tokens), generation.finish, cut.reason) == ("abc", "stop", "bc")
    start, tokens, logprobs, _ = heard[0]
    assert start == 0
    assert logprobs == [-token / 4 for token in tokens]


def test_the_first_stop_string_ends_an_answer_where_its_last_token_is() -> None:
    tokens = [0, 1, 2, 3, 0, 1]
    assert stop_of(tokens, ["da", "cd"], decode) == (4, "cd")
    assert stop_of(tokens, ["x"], decode) is None
    assert stop_of(tokens, [], decode) is None


async def stored_for(length: int) -> tuple[int, int]:
    """Tokens that are stored, and tokens that are told, while an answer grows to a length, one for each look."""
    stored = told = made = 0

    class Growing:
        def lengths(self) -> dict[str, int]:
            nonlocal made
            made += 1
            return {turn.id: made}

        def tokens(self, starts: Any) -> dict[str, tuple[int, ...]]:
            return {}

        def snapshot(self, sample_id: str) -> Generation:
            return Generation(sample_id, (7,), (0,) * made, (0.0,) * made, ((3, made),), None)

    class Listened:
        async def publish(self, partial: Partial) -> None:
            nonlocal stored
            stored += len(partial.tokens)

        async def tell(self, listener: str, what: Any) -> None:
            nonlocal told
            assert what["start"] == told
            told += len(what["tokens"]) // 4

    async def generating() -> Any:
        while made < length:
            await asyncio.sleep(0)
        return growing.snapshot(turn.id), None, 0

    turn = dataclasses.replace(TURN, stop=[])
    growing, listened = Growing(), Listened()
    watch = TurnWatch(cast("Any", listened), cast("Any", growing), decode, "rollout-0")
    watching = asyncio.create_task(watch.watch())
    try:
        async with asyncio.timeout(20):
            await watch.generate(turn, generating())
    finally:
        watching.cancel()
        [end] = await asyncio.gather(watching, return_exceptions=True)
    assert isinstance(end, asyncio.CancelledError), end
    return stored, told


async def test_what_is_stored_for_a_listener_grows_with_the_answer_and_not_with_its_square(monkeypatch: Any) -> None:
    monkeypatch.setattr(turn_watch, "LOOK_EVERY_S", 0.0)
    for length in (100, 1000, 4000):
        stored, told = await stored_for(length)
        assert length - told <= length // turn_watch.TOLD_SHARE + 2
        assert stored <= length * (turn_watch.TOLD_SHARE + 1)
