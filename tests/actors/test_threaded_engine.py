import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from actors.rollout import torch_engine
from actors.rollout.config import RolloutConfig
from actors.rollout.engine import (
    ContextTooLongError,
    Engine,
    EngineClosedError,
    Generation,
    InvalidRequestError,
    NonFiniteLogitsError,
    Request,
    Sampling,
    WeightsError,
)
from actors.rollout.load_weights import ReadWeights
from actors.rollout.threaded import ThreadedEngine
from actors.rollout.torch_engine import Decoder
from tests.actors.tiny_model import CONTEXT, VOCAB, make_model, save_weights, segment_logprobs

TOLERANCE = 1e-4  # nats, float32


class HeldDecoder(Decoder):
    """Makes no more tokens once an answer has `most`, so that a test can act in mid-answer, however slow it is."""

    most = CONTEXT

    def step(self) -> list[tuple[int, Generation]]:
        if max(self.lengths().values(), default=0) >= self.most:
            time.sleep(0.001)
            return []
        return super().step()


def request(name: str = "r", new: int = 30, seed: int = 1, length: int = 4) -> Request:
    return Request(name, tuple(range(5, 5 + length)), Sampling(new), seed)


def batch(count: int, new: int = 30) -> list[Request]:
    return [request(f"r{i}", new, seed=i, length=3 + i % 4) for i in range(count)]


@asynccontextmanager
async def serving(version: int = 0, seed: int = 0, kind: type[Decoder] = HeldDecoder, **config) -> AsyncIterator:
    engine = ThreadedEngine(kind(make_model(seed=seed), RolloutConfig(**{"slots": 8, **config}), version))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollstream-decoder"]


def launch(engine: Engine, requests: list[Request]) -> list[asyncio.Task[Generation]]:
    return [asyncio.create_task(engine.generate(one)) for one in requests]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def ready(weights: ReadWeights, *_: object) -> ReadWeights:
    return weights


def hold(engine: ThreadedEngine, tokens: int = CONTEXT) -> None:
    """Let answers grow to so many tokens at most; by default let them end."""
    engine._decoder.most = tokens


async def grown(engine: ThreadedEngine, tokens: int) -> None:
    """An answer has so many tokens, and no more come before `hold` allows them."""
    hold(engine, tokens)
    await until(lambda: max(engine.lengths().values(), default=0) >= tokens)


async def test_requests_beyond_the_slots_wait_their_turn_and_all_finish():
    """More samples than slots is the normal state of a busy worker."""
    async with serving(slots=4) as engine:
        hold(engine, 2)
        tasks = launch(engine, batch(11, new=5))
        await until(lambda: engine.stats().running == 4)
        assert engine.stats().waiting == 7
        hold(engine)
        done = await asyncio.gather(*tasks)
        stats = engine.stats()
    assert [generation.sample_id for generation in done] == [f"r{i}" for i in range(11)]
    assert all(len(generation.tokens) == 5 for generation in done)
    assert (stats.running, stats.waiting, stats.tokens_generated) == (0, 0, 55)
    assert stats.forward_passes >= 15
    assert stats.busy_s > 0
    assert stats.swapping_s == 0


async def test_a_batch_that_arrives_together_starts_together():
    """Waking the decoder for the first of many would prefill and decode it alone."""
    async with serving(kind=Decoder) as engine:
        await asyncio.gather(*launch(engine, batch(8, new=5)))
        assert engine.stats().forward_passes == 6


async def test_the_loop_is_free_while_a_long_step_runs():
    """Heartbeats and acknowledgements share the loop with generation; a forward of seconds must not delay them."""
    stepping, allowed = threading.Event(), threading.Event()

    class LongDecoder(Decoder):
        def step(self) -> list[tuple[int, Generation]]:
            if self.running:
                stepping.set()
                assert allowed.wait(20), "the loop waited for the step"
            return super().step()

    async with serving(kind=LongDecoder) as engine:
        task = asyncio.create_task(engine.generate(request(new=2)))
        await until(stepping.is_set)
        for _ in range(50):
            assert engine.lengths() == {"r": 0}
            await asyncio.sleep(0.001)
        allowed.set()
        assert len((await task).tokens) == 2


async def test_an_idle_engine_uses_no_processor():
    """A worker waits for prompts most of the time when the learner is the slower side."""
    async with serving() as engine:
        await engine.generate(request(new=2))
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "rollstream-decoder"]
        clock = time.pthread_getcpuclockid(thread.ident)
        before = time.clock_gettime(clock) + time.thread_time()
        await asyncio.sleep(0.3)
        assert time.clock_gettime(clock) + time.thread_time() - before < 0.1


async def test_updates_interrupt_running_samples_between_tokens(tmp_path):
    """The heart of it: nothing waits for the longest answer, and each token says which weights made it."""
    async with serving(on_update="recompute") as engine:
        tasks = launch(engine, batch(5))
        for version in (1, 2):
            await grown(engine, version * 8)
            await engine.update(version, save_weights(tmp_path / f"{version}.safetensors", seed=version))
            assert engine.version == version
        hold(engine)
        done = await asyncio.gather(*tasks)
        assert engine.stats().swapping_s > 0
    models = {version: make_model(seed=version) for version in (0, 1, 2)}
    for generation in done:
        assert [version for version, _ in generation.segments] == [0, 1, 2]
        assert sum(count for _, count in generation.segments) == 30
        assert generation.logprobs == pytest.approx(segment_logprobs(models, generation), abs=TOLERANCE)


async def test_new_requests_wait_until_a_cache_is_rebuilt(tmp_path, monkeypatch):
    """To take them in at once would be to prefill all rows at once, and every answer would be silent that long."""
    monkeypatch.setattr(torch_engine, "REBUILD_STEPS", 0)
    monkeypatch.setattr(torch_engine, "REBUILD_S", 0)
    rebuilding = []

    class WatchedDecoder(HeldDecoder):
        def add(self, requests):
            rebuilding.append(self.rebuilding)
            return super().add(requests)

    async with serving(kind=WatchedDecoder) as engine:
        first = launch(engine, batch(6))
        await grown(engine, 5)
        await engine.update(1, save_weights(tmp_path / "1.safetensors", seed=1))
        late = launch(engine, [request("late")])
        await until(lambda: engine.stats().waiting == 1)
        hold(engine)
        for generation in await asyncio.gather(*first, *late):
            assert generation.finish == "length"
    assert rebuilding == [0, 0]


async def test_samples_go_on_while_new_weights_are_read(tmp_path):
    """Reading a large model takes seconds; only writing it into memory stops the decoding."""
    allowed = threading.Event()

    class SlowReader(HeldDecoder):
        def read(self, *of):
            assert allowed.wait(20)
            return super().read(*of)

    async with serving(kind=SlowReader) as engine:
        (running,) = launch(engine, [request(new=40)])
        updating = asyncio.create_task(engine.update(1, save_weights(tmp_path / "1.safetensors", seed=1)))
        await grown(engine, 10)
        assert engine.version == 0
        allowed.set()
        await updating
        hold(engine)
        assert engine.version == 1
        assert engine.stats().swapping_s > 0
        assert [version for version, _ in (await running).segments] == [0, 1]


async def test_drain_finishes_with_the_old_weights_and_starts_nothing(tmp_path):
    """Synchronous training (staleness zero) must see whole samples of one version only."""
    async with serving(on_update="drain", slots=3) as engine:
        path = save_weights(tmp_path / "1.safetensors", seed=1)
        read = engine._decoder.read(path)
        engine._decoder.read = partial(ready, read)  # what may begin while it is read is no matter
        tasks = launch(engine, [request("short", new=8), *batch(4, new=20)])
        await grown(engine, 4)
        updating = asyncio.create_task(engine.update(1, path))
        await until(lambda: bool(engine._updates))
        hold(engine)
        await updating
        assert [task.done() for task in tasks] == [True, True, True, False, False]
        done = await asyncio.gather(*tasks)
    assert [generation.segments for generation in done] == [((0, 8),), ((0, 20),), ((0, 20),), ((1, 20),), ((1, 20),)]


async def test_a_hand_over_returns_everything_and_another_engine_finishes_it():
    """On SIGTERM a worker gives its samples back in mid-answer; the next one must lose no token and change none."""
    wanted = batch(6)
    async with serving(slots=8) as engine:
        undisturbed = await asyncio.gather(*launch(engine, wanted))
    async with serving(slots=4) as engine:
        tasks = launch(engine, wanted)
        await grown(engine, 6)
        seen = {name: engine.snapshot(name) for name in engine.lengths()}
        await engine.hand_over()
        handed = await asyncio.gather(*tasks)
        assert await engine.generate(request("late")) == Generation("late", (5, 6, 7, 8), (), (), (), None)
        prefix = handed[0]
        resumed = Request("r0", prefix.prompt_tokens, wanted[0].sampling, 0, prefix)
        assert await engine.generate(resumed) is prefix
    assert [len(generation.tokens) > 0 for generation in handed] == [True] * 4 + [False] * 2
    for generation in handed:
        assert generation.finish is None
        if generation.sample_id in seen:
            before = seen[generation.sample_id].tokens
            assert generation.tokens[: len(before)] == before
    async with serving(slots=8) as engine:
        again = [
            Request(one.sample_id, one.prompt_tokens, one.sampling, one.seed, prefix)
            for one, prefix in zip(wanted, handed, strict=True)
        ]
        done = await asyncio.gather(*launch(engine, again))
    assert [generation.tokens for generation in done] == [generation.tokens for generation in undisturbed]
    assert [generation.finish for generation in done] == ["length"] * 6


async def test_cancelling_a_call_frees_its_slot():
    """A sample that was dropped elsewhere must not hold a slot to its end."""
    async with serving(slots=1) as engine:
        running, waiting, last = launch(engine, [request("a", 90), request("b", 90), request("c", 3)])
        await grown(engine, 2)
        waiting.cancel()
        running.cancel()
        await asyncio.wait([waiting, running])
        hold(engine)
        assert (await last).sample_id == "c"
        assert engine.stats().tokens_generated < 90
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)


async def test_an_impossible_request_fails_alone():
    """One over-long or foreign prompt is one sample's problem."""
    async with serving() as engine:
        good = asyncio.create_task(engine.generate(request("good", 5)))
        with pytest.raises(ContextTooLongError):
            await engine.generate(Request("long", (5,) * CONTEXT, Sampling(1), 0))
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            await engine.generate(Request("foreign", (5, VOCAB), Sampling(1), 0))
        assert (await good).finish == "length"


async def test_unreadable_weights_fail_the_update_and_nothing_else(tmp_path):
    """The announcement may outlive the bytes; the worker can fetch again while its samples go on."""
    async with serving() as engine:
        task = asyncio.create_task(engine.generate(request()))
        await grown(engine, 3)
        hold(engine)
        with pytest.raises(WeightsError, match="cannot read"):
            await engine.update(1, tmp_path / "gone.safetensors")
        assert (await task).segments == ((0, 30),)


async def test_a_failure_of_the_decoder_reaches_every_caller():
    """A dead thread with callers that wait for ever is the worst kind of outage."""
    async with serving(slots=2) as engine:
        tasks = launch(engine, batch(4))
        await grown(engine, 3)
        engine._decoder._model.get_output_embeddings().weight.data.fill_(float("nan"))
        hold(engine)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, NonFiniteLogitsError) for result in results)
        with pytest.raises(NonFiniteLogitsError):
            await engine.generate(request())
        with pytest.raises(NonFiniteLogitsError):
            await engine.update(1, "unused")


async def test_closing_hands_over_and_ends_the_thread():
    """Shutdown must neither lose a running sample nor hang on one; `serving` checks that no thread is left."""
    async with serving() as engine:
        task = asyncio.create_task(engine.generate(request()))
        await grown(engine, 3)
        await asyncio.gather(engine.close(), engine.close())
        assert (await task).finish is None
        with pytest.raises(EngineClosedError):
            await engine.generate(request())
    never_started = ThreadedEngine(Decoder(make_model(), RolloutConfig()))
    with pytest.raises(EngineClosedError, match="not started"):
        await never_started.generate(request())
    await never_started.close()
