"""Batch invariance: with `rollout.deterministic` a sample is the same, bit for bit, whatever is decoded beside it."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from actors.rollout.config import RolloutConfig
from actors.rollout.engine import Generation, Request, Sampling
from actors.rollout.torch_engine import Decoder
from tests.actors.tiny_model import CONFIGS, VOCAB, make_model, plain_logprobs, save_weights


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decoder(kind: str, slots: int, **config: object) -> Decoder:
    return Decoder(
        make_model(kind), RolloutConfig(**{"slots": slots, "prefill_tokens": 512, "deterministic": True, **config})
    )


def requests(count: int, longest: int) -> list[Request]:
    """Prompts and answers below, on and above the lengths that shapes are rounded to; several ways to sample."""
    rng = random.Random(0)
    made = []
    for i in range(count):
        prompt = tuple(rng.randrange(2, VOCAB) for _ in range(min(longest, rng.choice([1, 2, 9, 30, 65, 66]))))
        sampling = Sampling(rng.choice([3, 25, 50]), temperature=rng.choice([0.7, 1.0]), top_k=rng.choice([0, 0, 6]))
        made.append(Request(f"r{i}", prompt, sampling, i))
    return made


def run(engine: Decoder, wanted: list[Request], per_turn: int) -> dict[str, Generation]:
    """Let requests join a few at a time while others decode."""
    waiting, done = list(wanted), {}
    while waiting or engine.running:
        joining = min(per_turn, engine.slots - engine.running)
        engine.add(waiting[:joining])
        waiting = waiting[joining:]
        done |= {generation.sample_id: generation for _, generation in engine.step()}
    return done


@pytest.mark.parametrize("slots", [8, 32])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_sample_is_the_same_bits_alone_in_company_and_in_any_order(kind: str, slots: int) -> None:
    """At η = 0 a run must equal the plain synchronous loop, though its samples meet in other batches."""
    wanted = requests(24, decoder(kind, slots).max_context - 1)
    few = run(decoder(kind, slots), wanted, per_turn=3)
    many = run(decoder(kind, slots), wanted[::-1], per_turn=7)
    engine = decoder(kind, slots)
    alone = {name: done for one in wanted for name, done in run(engine, [one], per_turn=1).items()}
    assert few == many == alone
    model = make_model(kind)
    for one in wanted:
        if one.sampling == replace(one.sampling, temperature=1.0, top_k=0):
            expected = plain_logprobs(model, one.prompt_tokens, few[one.sample_id].tokens)
            assert few[one.sample_id].logprobs == pytest.approx(expected, abs=1e-4)


def test_without_it_neighbours_change_the_last_bits() -> None:
    """Guards the test above: had batches no influence here, it would show nothing."""
    wanted = [request for request in requests(24, 80) if request.sampling.max_new_tokens > 3]
    few = run(decoder("qwen3", 8, deterministic=False), wanted, per_turn=3)
    alone = {}
    for one in wanted:
        alone |= run(decoder("qwen3", 8, deterministic=False), [one], per_turn=1)
    assert {name: done.tokens for name, done in few.items()} == {name: done.tokens for name, done in alone.items()}
    assert few != alone


def test_shapes_follow_from_the_config_and_the_prompt_alone() -> None:
    """Equal bits on the machine that runs this are one proof; that no other shape ever occurs holds on others too."""
    shapes: set[tuple[int, ...]] = set()
    model = make_model("qwen3")
    model.register_forward_pre_hook(lambda _, __, given: shapes.add(tuple(given["input_ids"].shape)), with_kwargs=True)
    engine = Decoder(model, RolloutConfig(slots=16, prefill_tokens=512, deterministic=True))
    run(engine, requests(40, 66), per_turn=9)
    assert shapes == {(16, 1), (8, 64), (4, 128)}  # decoding; prompts of up to 64 tokens; longer ones
    before = engine.forward_passes
    engine.add([Request("short", (2, 3, 4), Sampling(1), 0), Request("long", (2,) * 70, Sampling(1), 0)])
    assert engine.forward_passes - before == 2, "the short one would be as wide as its company"


def test_samples_interrupted_at_the_same_token_go_on_the_same(tmp_path) -> None:
    """New weights rebuild all caches at once, in other company than that in which they were made."""
    weights = save_weights(tmp_path / "1.safetensors", seed=1)
    wanted = [Request(f"r{i}", tuple(range(2, 4 + 9 * i)), Sampling(40), i) for i in range(5)]
    together = decoder("qwen3", 8)
    together.add(wanted)
    for _ in range(7):
        together.step()
    together.load(1, weights)
    done = run(together, [], per_turn=1)
    for one in wanted:
        alone = decoder("qwen3", 8)
        alone.add([one])
        for _ in range(7):
            alone.step()
        alone.load(1, weights)
        assert run(alone, [], per_turn=1)[one.sample_id] == done[one.sample_id]
        assert done[one.sample_id].segments == ((0, 7), (1, 33))


def test_it_wants_one_thread() -> None:
    """Several split a batch's rows among them, and a row's place then changes its last bits."""
    with pytest.raises(ValidationError, match="threads is 2"):
        RolloutConfig(deterministic=True, threads=2)
