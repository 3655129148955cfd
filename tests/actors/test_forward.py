import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MambaConfig, MambaForCausalLM

from actors.trainer.forward import ScoredTokens, collate, model_traits, response_logprobs
from actors.trainer.packing import pack
from tests.actors.tiny_models import VOCABULARY, gpt2, llama, qwen3

PACKING_MODELS = {
    "qwen3": qwen3,
    "qwen3 eager": lambda: qwen3(attn_implementation="eager"),
    "llama": llama,
    "gpt2": gpt2,
    "gpt2 eager": lambda: gpt2(attn_implementation="eager"),
}


def mamba():
    torch.manual_seed(0)
    return MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    ).eval()


def gemma2(window=4096):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": window}
    caps = {"final_logit_softcapping": 2.0, "initializer_range": 0.3, "pad_token_id": 0}
    return Gemma2ForCausalLM(Gemma2Config(**(sizes | heads | caps))).eval()


def sequences(count=9, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        P, T = rng.integers(1, 9), rng.integers(1, 20)
        prompt, response = (rng.integers(1, VOCABULARY, n).astype(np.int32) for n in (P, T))
        made.append(ScoredTokens(prompt, response, rng.random(T) < 0.8))
    return made


def naive(model, item, temperature=1.0):
    """One unpadded sequence through the whole model: what the logprobs mean."""
    ids = torch.from_numpy(np.concatenate([item.prompt, item.response])).long()[None]
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, -1)
    P = len(item.prompt)
    logprobs = [table[P + t - 1, int(item.response[t])] for t in np.flatnonzero(item.scored)]
    entropy = [-(table[P + t - 1].exp() * table[P + t - 1]).sum() for t in np.flatnonzero(item.scored)]
    return logprobs, entropy


def compare(model, items, temperature=1.0, *, shared, budget=120):
    seen = []
    for rows in pack([len(s) for s in items], micro_batch_tokens=budget, share_rows=shared):
        batch = collate(rows, items, shared=shared)
        with torch.no_grad():
            logprobs, entropy = response_logprobs(model, batch, temperature, entropy=True)
        expected = [naive(model, items[i], temperature) for i in batch.sequences]
        torch.testing.assert_close(logprobs, torch.tensor([v for lp, _ in expected for v in lp]), atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, torch.tensor([v for _, e in expected for v in e]), atol=1e-5, rtol=0)
        owner = [batch.sequences[k] for k in batch.sequence.tolist()]
        assert owner == [i for i in batch.sequences for _ in range(int(items[i].scored.sum()))]
        seen += batch.sequences
    assert sorted(seen) == list(range(len(items)))


@pytest.mark.parametrize("name", PACKING_MODELS)
def test_packed_logprobs_equal_those_of_each_sequence_alone(name):
    """A neighbour in the row, or a padded position, must not change a sequence by a hair."""
    model = PACKING_MODELS[name]()
    assert model_traits(model).can_share_rows(longest=100)
    assert model_traits(model).splits_head
    compare(model, sequences(), shared=True)


def test_logprobs_are_those_of_the_tempered_distribution():
    """The engine samples from softmax(logits / T); the ratio is only 1 if the trainer scores with the same T."""
    compare(qwen3(), sequences(), temperature=0.7, shared=True)


@pytest.mark.parametrize("build", [qwen3, mamba])
def test_one_sequence_a_row_gives_the_same_logprobs(build):
    """The road for models that cannot keep neighbours apart."""
    compare(build(), sequences(), shared=False)


def test_a_recurrent_model_is_found_to_leak_between_neighbours():
    """Its state crosses the border in a row, whatever mask it is given."""
    assert not model_traits(mamba()).can_share_rows(longest=10)


def test_a_model_that_caps_its_logits_takes_the_full_path():
    """The output head alone would give logits that nobody sampled from."""
    model = gemma2()
    assert not model_traits(model).splits_head
    compare(model, sequences(), shared=True)


def test_sequences_longer_than_a_local_window_get_rows_of_their_own():
    """Our mask replaces the model's, and with it the window."""
    traits = model_traits(gemma2(window=8))
    assert traits.can_share_rows(longest=8)
    assert not traits.can_share_rows(longest=9)
    compare(gemma2(window=8), sequences(), shared=False)


def test_finding_out_what_a_model_allows_leaves_its_mode_alone():
    model = qwen3().train()
    assert model_traits(model).packs
    assert model.training


def test_autocast_stays_near_float32_and_returns_float32():
    """Half the compute; the softmax itself is never in bfloat16."""
    model, items = qwen3(initializer_range=0.05), sequences()
    (rows,) = pack([len(s) for s in items], micro_batch_tokens=4096)
    batch = collate(rows, items, shared=True)
    with torch.no_grad():
        exact, _ = response_logprobs(model, batch)
        rounded, _ = response_logprobs(model, batch, autocast=torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, atol=5e-2, rtol=0)
