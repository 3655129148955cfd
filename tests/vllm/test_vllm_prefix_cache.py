"""A group's samples and an agent's turns begin alike: their prefill is shared, but never with older weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.rollout.engine import Generation, Request, Sampling
from tests.actors.tiny_model import plain_logprobs
from tests.vllm.served import SLOTS, VOCAB, Served, batch, launch, make_model, until

TOLERANCE = 1e-4
PROMPT = tuple(np.random.default_rng(0).integers(2, VOCAB, 500).tolist())


def group(count: int, new: int = 4) -> list[Request]:
    return [Request(f"g-{i}", PROMPT, Sampling(new), seed=i) for i in range(count)]


async def test_a_group_of_eight_prefills_its_prompt_once(served: Served) -> None:
    """The promise is a sixth at most; blocks of 32 tokens leave 20 of 500 for each to prefill by itself."""
    async with served.engine() as engine:
        done = await asyncio.gather(*launch(engine, group(8)))
        stats = engine.stats()
    assert stats.prefill_tokens + stats.cached_tokens == 8 * 500
    assert 8 * 500 / stats.prefill_tokens >= 6
    for generation in done:
        expected = plain_logprobs(make_model(), PROMPT, generation.tokens)
        assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_a_turn_begins_where_the_turn_before_ended(served: Served) -> None:
    """An agent's next prompt is its last one, its answer, and what came back."""
    async with served.engine() as engine:
        first = await engine.generate(group(1, new=60)[0])
        before = engine.stats()
        turn = replace(group(1)[0], prompt_tokens=PROMPT + first.tokens + (7, 8, 9))
        await engine.generate(turn)
        after = engine.stats()
    assert after.cached_tokens - before.cached_tokens == 544  # of 559 that are the same, in whole blocks of 32
    assert after.prefill_tokens - before.prefill_tokens == 563 - 544


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_a_new_version_never_meets_the_cache_of_an_old_one(served: Served, on_update: str) -> None:
    """Not even where running samples keep theirs: prompt tokens would have keys and values of a policy that is gone."""
    async with served.engine(on_update=on_update) as engine:
        await engine.generate(group(1)[0])
        running = asyncio.create_task(engine.generate(group(1, new=400)[0]))
        await until(lambda: engine.stats().running == 1)
        await engine.update(1, served.weights(1))
        before = engine.stats()
        fresh = await asyncio.gather(*launch(engine, group(8)))
        after = engine.stats()
        await running
    prefilled = after.prefill_tokens - before.prefill_tokens
    assert 500 <= prefilled <= 500 + 7 * 20
    for generation in fresh:
        assert generation.segments == ((1, 4),)
        expected = plain_logprobs(make_model(1), PROMPT, generation.tokens)
        assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)


class OnTheWay:
    """vLLM, but for requests that do not reach its core before `arrive` is set: so far it does not know them."""

    def __init__(self, llm: Any) -> None:
        self.arrive = asyncio.Event()
        self.waiting = 0
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(self, *what: Any) -> AsyncIterator[Any]:
        self.waiting += 1
        await self.arrive.wait()
        async for output in self._llm.generate(*what):
            yield output


async def test_who_is_on_its_way_to_the_core_when_it_is_to_begin_anew_is_not_made_to_its_end_before(
    served: Served,
) -> None:
    """To end what vLLM does not know yet does nothing. It was made whole, thrown away, and made once more."""
    async with served.engine(on_update="keep") as engine:
        engine._llm = way = OnTheWay(engine._llm)
        task = asyncio.create_task(engine.generate(group(1, new=300)[0]))
        await until(lambda: way.waiting == 1)
        await engine.update(1, served.weights(1))
        way.arrive.set()
        done = await task
        made = engine.stats().tokens_generated
        await engine.hand_over()
    assert done.segments == ((1, 300),)
    assert done.logprobs == pytest.approx(plain_logprobs(make_model(1), PROMPT, done.tokens), abs=TOLERANCE)
    assert made < 300 + 100, "it was ended as soon as it was known"


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_who_waits_for_a_slot_or_comes_during_an_update_begins_on_the_new_weights(
    served: Served, on_update: str
) -> None:
    """They were asked for under the old version, whose cache lies ready for their prompt and is gone for everybody."""
    async with served.engine(on_update=on_update) as engine:
        await engine.generate(group(1)[0])
        busy = launch(engine, batch(SLOTS, new=200))
        await until(lambda: engine.stats().running == SLOTS)
        waiting = launch(engine, group(3))
        await until(lambda: engine.stats().waiting == 3)
        await asyncio.sleep(0.05)
        update = asyncio.create_task(engine.update(1, served.weights(1)))
        late: list[asyncio.Task[Generation]] = []
        while not update.done():
            late += launch(engine, [replace(group(1)[0], sample_id=f"late-{len(late)}")])
            await asyncio.sleep(0.005)
        await update
        assert not any(task.done() for task in busy), "else nobody had to wait"
        fresh = await asyncio.gather(*waiting, *late[:8])
        await asyncio.gather(*busy, *late)
    for generation in fresh:
        assert generation.segments == ((1, 4),)
        expected = plain_logprobs(make_model(1), PROMPT, generation.tokens)
        assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)
