"""A group shares its prompt, and a long one costs more than a short answer: it is computed once, and once a version."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.rollout.config import RolloutConfig
from actors.rollout.engine import Generation, Request, Sampling
from actors.rollout.prompt_cache import PromptCache
from actors.rollout.torch_engine import Decoder
from tests.actors.tiny_model import CONFIGS, VOCAB, plain_logprobs

GROUP, PROMPT = 8, 500
TOLERANCE = 1e-4  # nats, float32


def long_model(seed: int = 0) -> PreTrainedModel:
    """As `tiny_model`'s, with room for the prompt."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.max_position_embeddings = 1024
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def decoder(**config: object) -> Decoder:
    return Decoder(long_model(), RolloutConfig(**{"slots": 4, "prefill_tokens": 512, **config}))


def group(name: str = "g", size: int = GROUP, length: int = PROMPT, new: int = 6) -> list[Request]:
    rng = random.Random(name)
    prompt = tuple(rng.randrange(2, VOCAB) for _ in range(length))
    return [Request(f"{name}-{i}", prompt, Sampling(new + 2 * i), i) for i in range(size)]


def run(engine: Decoder, waiting: list[Request]) -> dict[str, Generation]:
    """One sample joins at each step, as slots become free."""
    done: dict[str, Generation] = {}
    while waiting or engine.running:
        if waiting and engine.running < engine.slots:
            engine.add([waiting.pop(0)])
        done |= {generation.sample_id: generation for _, generation in engine.step()}
    return done


def test_a_group_that_comes_one_by_one_prefills_its_prompt_once() -> None:
    """Eight samples with a prompt of 500 tokens: a factor of 8. The same tokens come out, with the same logprobs."""
    engine, without = decoder(), decoder(prompt_cache_mib=0)
    done, expected = run(engine, group()), run(without, group())
    assert (without.prefill_tokens, without.cached_tokens) == (GROUP * (PROMPT - 1), 0)
    assert (engine.prefill_tokens, engine.cached_tokens) == (PROMPT - 1, (GROUP - 1) * (PROMPT - 1))
    assert without.prefill_tokens >= 6 * engine.prefill_tokens
    assert {name: generation.tokens for name, generation in done.items()} == {
        name: generation.tokens for name, generation in expected.items()
    }
    model = long_model()
    for generation in done.values():
        plain = plain_logprobs(model, generation.prompt_tokens, generation.tokens)
        assert generation.logprobs == pytest.approx(plain, abs=TOLERANCE)


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_new_weights_make_a_prompt_be_computed_again(tmp_path: Path, on_update: str) -> None:
    """Or the rest of the group would answer under one version what another version has read."""
    engine = decoder(on_update=on_update)
    first, *rest = group(size=4)
    run(engine, [first])
    other = long_model(seed=1)
    save_file({name: tensor.contiguous() for name, tensor in other.state_dict().items()}, tmp_path / "v1.safetensors")
    engine.load(1, tmp_path / "v1.safetensors")
    done = run(engine, rest)
    assert engine.prefill_tokens == 2 * (PROMPT - 1)
    for generation in done.values():
        assert generation.segments == ((1, len(generation.tokens)),)
        plain = plain_logprobs(other, generation.prompt_tokens, generation.tokens)
        assert generation.logprobs == pytest.approx(plain, abs=TOLERANCE)


def test_a_sample_that_is_resumed_is_no_prompt_of_others() -> None:
    """What it brings along is computed with its answer so far, and is not kept: nobody begins like that."""
    engine = decoder()
    one = group(size=1)[0]
    (ticket,) = engine.add([one])
    engine.step()
    engine.step()
    prefix = engine.remove(ticket)
    assert prefix is not None
    resumed = run(engine, [replace(one, prefix=prefix)])["g-0"]
    assert engine.prefill_tokens == PROMPT - 1 + PROMPT - 1 + len(prefix.tokens)
    assert resumed.tokens == run(decoder(), [one])["g-0"].tokens


def test_deterministic_decoding_gives_the_same_bits_with_a_copied_prompt() -> None:
    """A copy is what the same forward would give again: shapes follow from the length alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        mixed = [*group("a", 3, 70), *group("b", 3, 9), *group("c", 2, 130)]
        alone = {}
        for one in mixed:
            alone |= run(decoder(deterministic=True), [one])
        together = run(decoder(deterministic=True), random.Random(0).sample(mixed, len(mixed)))
        assert together == alone
    finally:
        torch.set_num_threads(before)


def entry(tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """8 bytes a token, K and V together."""
    return [(torch.zeros(1, tokens, 1), torch.zeros(1, tokens, 1))]


def test_the_cache_holds_its_bytes_and_forgets_what_was_used_longest_ago() -> None:
    cache = PromptCache(bytes_max=8 * 10)
    cache.put(b"a", entry(4))
    cache.put(b"b", entry(4))
    cache.put(b"too large", entry(11))
    assert cache.get(b"a") is not None
    cache.put(b"c", entry(4))
    assert [cache.get(key) is not None for key in (b"a", b"b", b"c", b"too large")] == [True, False, True, False]
    assert (len(cache), cache.nbytes) == (2, 64)
    cache.clear()
    assert (len(cache), cache.nbytes, cache.get(b"a")) == (0, 0, None)
