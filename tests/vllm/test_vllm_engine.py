"""vLLM is a program of others that changes monthly: what we rely on is held here, against fresh forward passes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.rollout.engine import (
    ContextTooLongError,
    EngineClosedError,
    Generation,
    InvalidRequestError,
    Request,
    Sampling,
    WeightsError,
)
from tests.actors.tiny_model import plain_logprobs, segment_logprobs
from tests.vllm.served import CONTEXT, STOP, VOCAB, Served, batch, grown, launch, make_model, request, runs, until

TOLERANCE = 1e-4  # nats, float32; measured: mean 2e-7, max 1.6e-5 over 4,096 tokens


async def test_logprobs_are_those_of_a_fresh_forward_pass(served: Served) -> None:
    """The trainer divides by them."""
    async with served.engine() as engine:
        done = await asyncio.gather(*launch(engine, batch(11)))
    for generation, wanted in zip(done, batch(11), strict=True):
        assert generation.sample_id == wanted.sample_id
        assert generation.finish == "length"
        assert generation.segments == ((0, 60),)
        expected = plain_logprobs(make_model(), generation.prompt_tokens, generation.tokens)
        assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_logprobs_are_of_the_distribution_that_was_drawn_from(served: Served) -> None:
    """After temperature, top-k and top-p, in this order, as with the built-in engine; a greedy choice is certain."""
    wanted = [
        request("warm", temperature=0.7),
        request("top-k", temperature=1.3, top_k=5),
        request("top-p", top_p=0.5),
        request("both", temperature=0.9, top_k=20, top_p=0.7),
        request("greedy", temperature=0.0),
    ]
    async with served.engine() as engine:
        done = await asyncio.gather(*launch(engine, wanted))
    for generation, one in zip(done, wanted, strict=True):
        assert generation.logprobs == pytest.approx(naive_logprobs(generation, one.sampling), abs=TOLERANCE)


def naive_logprobs(generation: Generation, sampling: Sampling) -> list[float]:
    """Position by position, with sorted probabilities."""
    everything = torch.tensor([generation.prompt_tokens + generation.tokens])
    with torch.inference_mode():
        logits = make_model()(everything).logits[0].double().numpy()
    first, told = len(generation.prompt_tokens), []
    for position, token in enumerate(generation.tokens):
        row = logits[first - 1 + position]
        if sampling.temperature == 0.0:
            assert token == row.argmax()
            told.append(0.0)
            continue
        probs = np.exp((row - row.max()) / sampling.temperature)
        order = np.argsort(-probs)
        if sampling.top_k:
            probs[order[sampling.top_k :]] = 0.0
        probs /= probs.sum()
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= sampling.top_p]] = 0.0
        told.append(float(np.log(probs[token] / probs.sum())))
    return told


async def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours(served: Served) -> None:
    """A group's samples must differ, and a sample that is made again must be the same."""
    async with served.engine() as engine:
        alone = await engine.generate(request(seed=7))
        crowd = await asyncio.gather(*launch(engine, [request("same", seed=7), *batch(7)]))
        beyond = await engine.generate(request(seed=7 + 2**64))
    assert crowd[0].tokens == alone.tokens == beyond.tokens
    assert len({generation.tokens for generation in crowd}) == 8


async def test_a_stop_token_ends_the_answer_and_belongs_to_it(served: Served) -> None:
    """The model's own end-of-text must count no more than what the recipe names."""
    async with served.engine() as engine:
        free = await engine.generate(request(new=200))
        stops = (free.tokens[20], free.tokens[30])
        stopped = await engine.generate(request(new=200, stop_token_ids=stops))
        again = await asyncio.gather(*launch(engine, batch(8, new=400)))
    first = min(free.tokens.index(stop) for stop in stops)
    assert stopped.finish == "stop"
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.logprobs == pytest.approx(free.logprobs[: first + 1], abs=TOLERANCE)
    assert {generation.finish for generation in again} == {"length"}
    assert any(STOP in generation.tokens for generation in again)


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_updates_interrupt_running_samples_between_tokens(served: Served, on_update: str) -> None:
    """The heart of it: tokens before stay, each names the weights that made it, and those weights did make it.

    With the cache kept, what follows is not what a fresh pass gives: half of the keys and values are of old weights.
    """
    async with served.engine(on_update=on_update) as engine:
        tasks = launch(engine, batch(8, new=300))
        for version in (1, 2):
            await until(grown(engine, version * 40))
            before = {name: engine.snapshot(name) for name in engine.lengths()}
            await engine.update(version, served.weights(version))
            assert engine.version == version
        done = await asyncio.gather(*tasks)
        assert engine.stats().swapping_s > 0
    models = {version: make_model(version) for version in (0, 1, 2)}
    for generation in done:
        assert [version for version, _ in generation.segments] == [0, 1, 2]
        assert sum(count for _, count in generation.segments) == len(generation.tokens) == 300
        kept = before[generation.sample_id]
        assert generation.tokens[: len(kept.tokens)] == kept.tokens
        assert generation.logprobs[: len(kept.tokens)] == kept.logprobs
        assert runs(generation)[: len(kept.segments) - 1] == list(kept.segments[:-1])
        off = np.abs(np.array(generation.logprobs) - segment_logprobs(models, generation))
        first = generation.segments[0][1]
        assert off[:first].max() < TOLERANCE
        assert (off[first:].max() < TOLERANCE) == (on_update == "recompute")


async def test_drain_finishes_with_the_old_weights_and_starts_nothing(served: Served) -> None:
    """Synchronous training must see whole samples of one version only."""
    async with served.engine(on_update="drain", slots=3) as engine:
        tasks = launch(engine, batch(5, new=40))
        await until(grown(engine, 4))
        await engine.update(1, served.weights(1))
        assert [task.done() for task in tasks] == [True, True, True, False, False]
        done = await asyncio.gather(*tasks)
    assert [generation.segments for generation in done] == [((0, 40),)] * 3 + [((1, 40),)] * 2


async def test_a_hand_over_keeps_all_tokens_and_another_engine_goes_on_from_them(served: Served) -> None:
    """On SIGTERM no token is lost. The random stream is another one after that, as documented."""
    async with served.engine() as engine:
        tasks = launch(engine, batch(12, new=100))
        await until(grown(engine, 30))
        seen = {name: engine.snapshot(name) for name in engine.lengths()}
        await engine.hand_over()
        handed = await asyncio.gather(*tasks)
        assert await engine.generate(request("late")) == Generation("late", (5, 6, 7, 8), (), (), (), None)
    assert {generation.finish for generation in handed} == {None}
    for generation in handed:
        before = seen[generation.sample_id]
        assert generation.tokens[: len(before.tokens)] == before.tokens
        assert runs(generation) == ([(0, len(generation.tokens))] if generation.tokens else [])
    async with served.engine() as engine:
        await engine.update(1, served.weights(1))
        again = [replace(one, prefix=prefix) for one, prefix in zip(batch(12, new=100), handed, strict=True)]
        done = await asyncio.gather(*launch(engine, again))
        once_more = await asyncio.gather(*launch(engine, again))
    assert [generation.tokens for generation in once_more] == [generation.tokens for generation in done]
    models = {version: make_model(version) for version in (0, 1)}
    for generation, prefix in zip(done, handed, strict=True):
        length = len(prefix.tokens)
        assert len(generation.tokens) == 100
        assert generation.tokens[:length] == prefix.tokens
        assert generation.segments == ((0, length), (1, 100 - length)) if length else ((1, 100),)
        assert generation.logprobs == pytest.approx(segment_logprobs(models, generation), abs=TOLERANCE)


async def test_a_prefix_that_is_complete_is_returned_as_it_is(served: Served) -> None:
    """A worker may die between the last token and its message."""
    async with served.engine() as engine:
        done = await engine.generate(request(new=5))
        assert await engine.generate(replace(request(new=5), prefix=replace(done, finish=None))) == done


async def test_impossible_requests_fail_alone(served: Served) -> None:
    """One over-long or foreign prompt is one sample's problem."""
    async with served.engine() as engine:
        good = asyncio.create_task(engine.generate(request("good")))
        with pytest.raises(ContextTooLongError):
            await engine.generate(Request("long", (5,) * CONTEXT, Sampling(1), 0))
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            await engine.generate(Request("foreign", (5, VOCAB), Sampling(1), 0))
        assert (await good).finish == "length"
        full = await engine.generate(Request("full", (5,) * (CONTEXT - 3), Sampling(50), 0))
        assert (len(full.tokens), full.finish) == (3, "length")


async def test_cancelling_a_call_frees_its_slot(served: Served) -> None:
    """A sample that was dropped elsewhere must not hold a slot to its end."""
    async with served.engine() as engine:
        tasks = launch(engine, batch(8, new=900))
        await until(grown(engine, 2, count=8))
        for task in tasks:
            task.cancel()
        assert (await engine.generate(request(new=3))).finish == "length"
        assert engine.stats().tokens_generated < 8 * 900
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)


async def test_weights_that_do_not_fit_are_refused_and_nothing_else_happens(served: Served) -> None:
    """The announcement may outlive the bytes; half a model is worse than an old one."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(served.weights(1))
    name = "model.layers.1.self_attn.k_proj.weight"
    lacking = served.folder / "lacking.safetensors"
    save_file({key: value for key, value in tensors.items() if key != name}, lacking)
    misshapen = served.folder / "misshapen.safetensors"
    save_file(tensors | {name: torch.zeros(64, 64)}, misshapen)
    cut = served.folder / "cut.safetensors"
    cut.write_bytes(served.weights(1).read_bytes()[:-1000])
    async with served.engine() as engine:
        task = asyncio.create_task(engine.generate(request(new=200)))
        await until(grown(engine, 3))
        for path, why in (
            (served.folder / "gone.safetensors", "cannot read"),
            (lacking, "missing: model.layers.1.self_attn.k_proj.weight"),
            (misshapen, "of another shape"),
            (cut, "cannot read"),
        ):
            with pytest.raises(WeightsError, match=why):
                await engine.update(1, path)
        assert engine.version == 0
        generation = await task
    assert generation.segments == ((0, 200),)
    assert generation.logprobs == pytest.approx(segment_logprobs({0: make_model()}, generation), abs=TOLERANCE)


async def test_a_closed_engine_says_so(served: Served) -> None:
    """Shutdown must neither lose a running sample nor hang on one."""
    async with served.engine() as engine:
        task = asyncio.create_task(engine.generate(request(new=900)))
        await until(grown(engine, 3))
        await engine.close()
        await engine.close()
        assert (await task).finish is None
        with pytest.raises(EngineClosedError):
            await engine.generate(request())
