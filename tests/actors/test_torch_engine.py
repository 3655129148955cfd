import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig

from actors.rollout import torch_engine
from actors.rollout.config import RolloutConfig
from actors.rollout.engine import (
    ContextTooLongError,
    Generation,
    InvalidRequestError,
    Request,
    Sampling,
    UnsupportedModelError,
    WeightsError,
)
from actors.rollout.sampling import stream_key, uniforms
from actors.rollout.torch_engine import Decoder
from tests.actors.tiny_model import (
    CONFIGS,
    CONTEXT,
    VOCAB,
    make_model,
    plain_logprobs,
    save_weights,
    segment_logprobs,
)

TOLERANCE = 1e-4  # nats, float32


def decoder(kind: str = "qwen3", seed: int = 0, version: int = 0, **config: object) -> Decoder:
    return Decoder(make_model(kind, seed), RolloutConfig(**{"slots": 8, "prefill_tokens": 64, **config}), version)


def request(name: str, length: int = 5, new: int = 20, seed: int | None = None, **sampling: object) -> Request:
    rng = random.Random(name)
    prompt = tuple(rng.randrange(2, VOCAB) for _ in range(length))
    return Request(name, prompt, Sampling(new, **sampling), rng.randrange(2**32) if seed is None else seed)


def mixed_requests(count: int = 20) -> list[Request]:
    rng = random.Random(1)
    return [request(f"r{i}", rng.choice([1, 2, 5, 9, 30]), rng.choice([1, 3, 10, 25])) for i in range(count)]


def run(engine: Decoder, requests: list[Request], per_turn: int = 3) -> dict[str, Generation]:
    """Let requests join a few at a time while others decode."""
    waiting, done = list(requests), {}
    while waiting or engine.running:
        joining = min(per_turn, engine.slots - engine.running)
        engine.add(waiting[:joining])
        waiting = waiting[joining:]
        done |= {generation.sample_id: generation for _, generation in engine.step()}
    return done


@pytest.fixture
def one_by_one(monkeypatch):
    """The cache is rebuilt row by row."""
    monkeypatch.setattr(torch_engine, "REBUILD_STEPS", 0)
    monkeypatch.setattr(torch_engine, "REBUILD_S", 0)
    monkeypatch.setattr(torch_engine, "PART_TOKENS", CONTEXT)


@pytest.fixture
def all_at_once(monkeypatch):
    """The cache is rebuilt in one share."""
    monkeypatch.setattr(torch_engine, "REBUILD_S", 1e9)


def steps(engine: Decoder, count: int) -> None:
    for _ in range(count):
        assert engine.step() == []


@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_equal_a_full_forward_whoever_joins_and_leaves(kind):
    """The promise that the learner relies on: slots, moves, padding and growth of the cache leave no trace."""
    engine = decoder(kind)
    wanted = [*mixed_requests(), request("grows the cache", 60, 30)]
    wanted = [one for one in wanted if len(one.prompt_tokens) < engine.max_context]
    done = run(engine, wanted)
    assert len(done) == len(wanted) > 10
    model = make_model(kind)
    for generation in done.values():
        expected = plain_logprobs(model, generation.prompt_tokens, generation.tokens)
        assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_lengths_are_long_tailed_and_every_row_is_its_own():
    """Guards the test above: it says little unless rows of different lengths really decode side by side."""
    done = run(decoder(), mixed_requests())
    assert [len(done[r.sample_id].tokens) for r in mixed_requests()] == [
        r.sampling.max_new_tokens for r in mixed_requests()
    ]
    assert len({generation.tokens for generation in done.values()}) > 15


def test_a_seed_gives_the_same_tokens_whatever_its_neighbours():
    """Replay and group comparisons need a sample to depend on its prompt, seed and weights alone."""
    requests = mixed_requests()
    together = run(decoder(), requests)
    for one in requests:
        alone = run(decoder(slots=1), [one])[one.sample_id]
        assert alone.tokens == together[one.sample_id].tokens
    again = run(decoder(slots=5), requests[::-1], per_turn=2)
    assert {name: g.tokens for name, g in again.items()} == {name: g.tokens for name, g in together.items()}


def test_token_i_is_drawn_with_number_i_of_the_seed_s_stream():
    """The documented meaning of a seed: anyone can redraw a recorded answer from its logits, prompt length aside."""
    wanted = request("r", length=7)
    generation = run(decoder(), [wanted, request("other")])["r"]
    with torch.inference_mode():
        logits = make_model()(torch.tensor([wanted.prompt_tokens + generation.tokens])).logits[0, 6:-1]
    above = logits.double().softmax(-1).cumsum(-1)
    numbers = uniforms(np.full(20, stream_key(wanted.seed), dtype=np.uint64), np.arange(20))
    redrawn = torch.searchsorted(above, torch.from_numpy(numbers)[:, None], right=True)[:, 0]
    assert tuple(redrawn.tolist()) == generation.tokens


def test_samples_of_one_prompt_share_its_prefill_and_differ_by_seed():
    """A group asks for the same prompt many times; computing it once is the cheapest speed there is."""
    engine = decoder(prefill_tokens=8)  # room for one prompt
    group = [request("group", 9, 12, seed=i) for i in range(8)]
    tickets = engine.add(group)
    assert engine.forward_passes == 1
    done = {}
    while engine.running:
        done |= dict(engine.step())
    assert len({done[ticket].tokens for ticket in tickets}) == 8
    for ticket in tickets:
        expected = plain_logprobs(make_model(), done[ticket].prompt_tokens, done[ticket].tokens)
        assert done[ticket].logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_prefill_keeps_to_its_budget_of_padded_tokens():
    """The budget bounds the memory of a forward and how long running sequences wait for newcomers."""
    engine = decoder(prefill_tokens=64)
    engine.add([request(f"r{i}", 31) for i in range(6)])  # 30 tokens each but for the newest: two a forward
    assert engine.forward_passes == 3
    engine = decoder(prefill_tokens=16)
    engine.add([request("longer than the budget", 40)])  # 39 tokens, in parts
    assert engine.forward_passes == 3


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_long_prompt_is_prefilled_in_parts_once_for_its_group(kind, monkeypatch):
    """A mask of all its tokens by all its tokens would be more than the memory of a forward is to be."""
    monkeypatch.setattr(torch_engine, "PART_TOKENS", 1)
    prompt = request("p", 18).prompt_tokens
    group = [Request(f"s{seed}", prompt, Sampling(6), seed) for seed in range(4)]
    other = request("other", 18, new=6)
    engine = decoder(kind, prefill_tokens=6, prompt_cache_mib=0)
    engine.add([*group, other])
    assert engine.forward_passes == 6
    assert engine.prefill_tokens == 2 * 17
    for generation in run(engine, []).values():
        assert generation.logprobs == pytest.approx(
            plain_logprobs(make_model(kind), generation.prompt_tokens, generation.tokens), abs=TOLERANCE
        )


@pytest.mark.usefixtures("one_by_one")
def test_a_long_answer_is_rebuilt_in_parts_between_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_engine, "PART_TOKENS", 10)
    engine = decoder()
    engine.add([request("short", 3), request("long", 30)])
    steps(engine, 2)
    engine.load(1, save_weights(tmp_path / "1.safetensors", seed=1))
    for rebuilding in (1, 1, 1, 1, 0):  # 4 tokens of one; 31 of the other
        steps(engine, 1)
        assert engine.rebuilding == rebuilding
    assert engine.lengths() == {"short": 2 + 5, "long": 2 + 1}
    models = {version: make_model(seed=version) for version in (0, 1)}
    for generation in run(engine, []).values():
        assert generation.logprobs == pytest.approx(segment_logprobs(models, generation), abs=TOLERANCE)


def test_a_finished_row_leaves_the_batch_at_once():
    """A finished sample must neither cost compute nor hold its slot while others run on."""
    engine = decoder()
    short, _, _ = engine.add([request("short", new=2), request("a", new=9), request("b", new=9)])
    steps(engine, 1)
    assert [ticket for ticket, _ in engine.step()] == [short]
    assert engine.running == 2
    assert engine.lengths() == {"a": 2, "b": 2}


def test_a_running_sample_can_be_looked_at_in_part_as_on_the_whole():
    """Who looks twenty times a second asks for what is new; a resumed one counts from the begin of its answer."""
    engine = decoder()
    kept = Generation("kept", (5, 6, 7, 8), (9, 9, 9), (-1.0,) * 3, ((0, 3),), None)
    engine.add([request("a", new=9), Request("kept", kept.prompt_tokens, Sampling(9), 1, kept)])
    steps(engine, 2)
    whole = {name: engine.snapshot(name).tokens for name in engine.lengths()}
    assert {name: len(tokens) for name, tokens in whole.items()} == engine.lengths() == {"a": 2, "kept": 5}
    for start in range(7):
        asked = {"kept": start, "a": start, "gone": 0}
        assert engine.tokens(asked) == {name: tokens[start:] for name, tokens in whole.items()}
    assert engine.tokens({"a": 0}) == {"a": whole["a"]}
    assert engine.snapshot("gone") is None


def test_a_stop_token_ends_the_answer_and_belongs_to_it():
    """The learner must see the decision to stop; a sample cut by the limit must be told from one that ended."""
    full = run(decoder(), [request("r", new=20)])["r"]
    assert (full.finish, len(full.tokens)) == ("length", 20)
    stop = full.tokens[7]
    first = full.tokens.index(stop)
    stopped = run(decoder(), [request("r", new=20, stop_token_ids=(VOCAB + 5, stop)), request("other")])["r"]
    assert (stopped.finish, stopped.tokens) == ("stop", full.tokens[: first + 1])
    at_the_limit = run(decoder(), [request("r", new=first + 1, stop_token_ids=(stop,))])["r"]
    assert at_the_limit.finish == "stop"


def test_truncated_sampling_reports_the_truncated_distribution():
    """The behaviour policy is what was sampled from, after temperature, top-k and top-p."""
    wanted = [
        request("k", temperature=0.8, top_k=3),
        request("p", temperature=1.3, top_p=0.6),
        request("kp", top_k=9, top_p=0.7),
        request("plain"),
    ]
    done = run(decoder(), wanted)
    for one in wanted:
        generation = done[one.sample_id]
        with torch.inference_mode():
            logits = make_model()(torch.tensor([one.prompt_tokens + generation.tokens])).logits[0]
        for i, (token, logprob) in enumerate(zip(generation.tokens, generation.logprobs, strict=True)):
            row = (logits[len(one.prompt_tokens) - 1 + i] / one.sampling.temperature).double()
            order = row.sort(descending=True).indices
            kept = order[: one.sampling.top_k or VOCAB]
            mass = row[kept].softmax(0).cumsum(0)
            kept = kept[: int((mass < one.sampling.top_p).sum()) + 1]
            assert token in kept
            assert logprob == pytest.approx(float(row[token] - row[kept].logsumexp(0)), abs=TOLERANCE)


@pytest.mark.usefixtures("all_at_once")
def test_three_versions_in_one_sample_each_equal_a_full_forward_of_their_own(tmp_path):
    """Interruption as in the paper: kept tokens keep version and logprobs, later ones come from the new weights with
    the whole prefix read anew. Rows of all lengths, as the cache of each is rebuilt."""
    models = {version: make_model(seed=version) for version in (3, 4, 5)}
    engine = decoder(seed=3, version=3)
    long = [request(f"r{i}", length, new=15) for i, length in enumerate((1, 4, 4, 20))]
    engine.add([*long, request("r1", 4, new=15)])
    steps(engine, 4)
    engine.load(4, save_weights(tmp_path / "4.safetensors", seed=4))
    steps(engine, 6)
    engine.load(5, save_weights(tmp_path / "5.safetensors", seed=5))
    done = run(engine, [])
    assert set(done) == {one.sample_id for one in long}
    for generation in done.values():
        assert generation.segments == ((3, 4), (4, 6), (5, 5))
        assert generation.logprobs == pytest.approx(segment_logprobs(models, generation), abs=TOLERANCE)


@pytest.mark.usefixtures("one_by_one")
def test_after_an_update_short_answers_go_on_while_long_ones_are_rebuilt(tmp_path):
    """Prefilling all that runs takes many times what the weights take: nobody should wait for it who need not."""
    engine = decoder()
    engine.add([request(name, length) for name, length in {"long": 40, "short": 3, "middle": 20}.items()])
    steps(engine, 2)
    passes, weights = engine.forward_passes, save_weights(tmp_path / "1.safetensors", seed=1)
    engine.load(1, weights)
    assert (engine.forward_passes, engine.rebuilding) == (passes, 3)
    for step, (short, middle, long) in enumerate([(3, 2, 2), (4, 3, 2), (5, 4, 3)], 1):
        steps(engine, 1)
        assert engine.rebuilding == 3 - step
        assert engine.lengths() == {"short": short, "middle": middle, "long": long}
    assert engine.forward_passes == passes + 6
    models = {version: make_model(seed=version) for version in (0, 1)}
    for generation in run(engine, []).values():
        assert generation.segments == ((0, 2), (1, 18))
        assert generation.logprobs == pytest.approx(segment_logprobs(models, generation), abs=TOLERANCE)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("seed", range(8))
def test_a_cache_half_rebuilt_serves_whoever_comes_goes_or_ends(seed, tmp_path, monkeypatch):
    """Updates in the midst of a rebuilding, answers that end, are cancelled and begin there: none reads another's."""
    rng = random.Random(seed)
    monkeypatch.setattr(torch_engine, "PART_TOKENS", rng.choice([3, 7, CONTEXT]))
    models = {version: make_model(seed=version) for version in range(4)}
    paths = {version: save_weights(tmp_path / f"{version}.safetensors", seed=version) for version in models}
    engine, done, asked = decoder(prompt_cache_mib=rng.choice([0, 1])), {}, 0
    tickets: list[int] = []
    halves = 0
    while len(done) < 40:
        action = rng.random()
        halves += 0 < engine.rebuilding < engine.running
        if action < 0.15 and engine.running > 4:
            version = rng.choice([version for version in models if version != engine.version])
            engine.load(version, paths[version])
        elif action < 0.2 and tickets:
            removed = engine.remove(tickets.pop(rng.randrange(len(tickets))))
            done |= {removed.sample_id: removed} if removed else {}
        elif action < (0.22 if engine.rebuilding else 0.5):
            joining = [
                request(f"{asked + i}", rng.choice([1, 2, 9, 30]), rng.choice([2, 9, 25]))
                for i in range(rng.randint(0, engine.slots - engine.running))
            ]
            asked += len(joining)
            tickets += engine.add(joining)
        else:
            done |= {generation.sample_id: generation for _, generation in engine.step()}
    assert halves > 5
    for generation in done.values():
        assert generation.logprobs == pytest.approx(segment_logprobs(models, generation), abs=TOLERANCE)


@pytest.mark.usefixtures("all_at_once")
def test_keep_leaves_the_old_cache_in_place(tmp_path):
    """`keep` is the cheap choice: same past tokens, but the future reads keys of the old weights."""
    done = {}
    for choice in ("keep", "recompute"):
        engine = decoder(on_update=choice)
        engine.add([request("r", 10, 20)])
        steps(engine, 8)
        before = engine.forward_passes
        engine.load(1, save_weights(tmp_path / "1.safetensors", seed=1))
        steps(engine, 1)
        assert engine.forward_passes - before == (1 if choice == "keep" else 2)
        done[choice] = run(engine, [])["r"]
        assert done[choice].segments == ((0, 8), (1, 12))
    assert done["keep"].tokens[:8] == done["recompute"].tokens[:8]
    assert done["keep"].logprobs[:8] == done["recompute"].logprobs[:8]
    models = {version: make_model(seed=version) for version in (0, 1)}
    error = np.subtract(done["keep"].logprobs, segment_logprobs(models, done["keep"]))
    assert np.abs(error[:8]).max() < TOLERANCE
    assert np.abs(error[8:]).max() > 100 * TOLERANCE


def test_a_sample_resumed_elsewhere_is_the_sample_undisturbed(tmp_path):
    """A preempted worker's prefix must continue at its place in the random stream, its tokens kept verbatim."""
    wanted = request("r", 6, 20)
    undisturbed = run(decoder(), [wanted])["r"]
    first = decoder()
    ticket, _ = first.add([wanted, request("other")])
    steps(first, 7)
    prefix = first.remove(ticket)
    assert prefix is not None
    assert (prefix.finish, len(prefix.tokens), first.running) == (None, 7, 1)
    assert first.remove(ticket) is None
    resumed = Request("r", wanted.prompt_tokens, wanted.sampling, wanted.seed, prefix)
    done = run(decoder(version=2), [request("another", 3), resumed])["r"]
    assert done.tokens == undisturbed.tokens
    assert done.logprobs[:7] == prefix.logprobs
    assert done.logprobs == pytest.approx(undisturbed.logprobs, abs=TOLERANCE)
    assert done.segments == ((0, 7), (2, 13))
    assert run(decoder(version=0), [resumed])["r"].segments == ((0, 20),)


def test_a_prefix_that_is_complete_needs_no_decoding():
    """A partial may be resumed under a smaller limit, or end with what has become a stop token."""
    engine = decoder()
    prefix = Generation("r", (5, 6), (7, 8), (-1.0, -2.0), ((0, 2),), None)
    cases = [(Sampling(2), "length"), (Sampling(9, stop_token_ids=(8,)), "stop"), (Sampling(9), None)]
    for sampling, finish in cases:
        complete = engine.check(Request("r", (5, 6), sampling, 0, prefix))
        assert (complete and complete.finish) == finish


@pytest.mark.parametrize(("kind", "limit"), [("qwen3", CONTEXT), ("gpt2", CONTEXT), ("mistral", 24)])
def test_an_answer_ends_where_the_context_does(kind, limit):
    """Beyond its positions, or its window, a model's logprobs would no longer be those of a full forward."""
    engine = decoder(kind)
    assert engine.max_context == limit
    cut = run(engine, [request("cut", limit - 3, 50), request("barely", limit - 1, 50)])
    assert (cut["cut"].finish, len(cut["cut"].tokens), len(cut["barely"].tokens)) == ("length", 3, 1)
    with pytest.raises(ContextTooLongError, match=f"context of {limit}"):
        engine.check(request("too long", limit, 1))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request("r", (), Sampling(1), 0), "empty"),
        (Request("r", (2, VOCAB), Sampling(1), 0), "tokenizer"),
        (Request("r", (-1,), Sampling(1), 0), "tokenizer"),
        (Request("r", (2,), Sampling(1), 0, Generation("r", (3,), (), (), (), None)), "another prompt"),
    ],
)
def test_an_impossible_request_is_refused_by_name(bad, message):
    """Inside a forward it would be an index error that takes every other sample down with it."""
    with pytest.raises(InvalidRequestError, match=message):
        decoder().check(bad)


def test_weights_that_do_not_fit_change_nothing(tmp_path):
    """A torn or foreign file must not leave a model of half old and half new weights."""
    engine = decoder()
    undisturbed = run(decoder(), [request("r")])["r"]
    engine.add([request("r")])
    steps(engine, 3)
    save_weights(tmp_path / "gpt2.safetensors", "gpt2")
    (tmp_path / "torn.safetensors").write_bytes(b"\x00" * 20)
    (tmp_path / "empty").mkdir()
    for name, message in (("gpt2", "missing"), ("torn", "cannot read"), ("empty", "no .*safetensors")):
        path = tmp_path / (name if name == "empty" else f"{name}.safetensors")
        with pytest.raises(WeightsError, match=message):
            engine.load(1, path)
    assert engine.version == 0
    assert run(engine, [])["r"] == undisturbed


def test_weights_come_from_a_saved_model_too(tmp_path):
    """A directory as `save_pretrained` writes it, in shards, is what checkpoints and warm starts look like."""
    make_model(seed=7).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    expected = run(decoder(seed=7), [request("r")])["r"]
    started = Decoder.from_pretrained(tmp_path, RolloutConfig(slots=2), version=0)
    updated = decoder(seed=0)
    updated.load(0, tmp_path)
    assert run(started, [request("r")])["r"].tokens == run(updated, [request("r")])["r"].tokens == expected.tokens


def test_weights_are_no_pages_of_the_file_that_they_came_from(tmp_path):
    """The first update had to copy the pages that it wrote, and to read them from the disk if they were not in memory
    any more: seconds without a token, where all later ones take hundredths."""
    make_model().save_pretrained(tmp_path)
    engine = Decoder.from_pretrained(tmp_path, RolloutConfig(slots=1))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    ranges = [[int(address, 16) for address in fields[0].split("-")] for fields in maps]
    for parameter in engine._model.parameters():
        assert not any(start <= parameter.data_ptr() < stop for start, stop in ranges)
    assert run(engine, [request("r", new=3)])["r"].tokens == run(decoder(), [request("r", new=3)])["r"].tokens


def test_bfloat16_stays_near_float32():
    """The cheap dtype is for larger models; its logprobs may differ by rounding, not by a bug in masks or dtypes."""
    engine = Decoder(make_model().bfloat16(), RolloutConfig(slots=4, dtype="bfloat16"))
    done = run(engine, mixed_requests(6))
    model = make_model()
    for generation in done.values():
        expected = plain_logprobs(model, generation.prompt_tokens, generation.tokens)
        assert np.abs(np.subtract(generation.logprobs, expected)).mean() < 0.05


def test_recurrent_models_are_refused_at_the_start():
    """Their state cannot be rebuilt row by row; better no worker than wrong logprobs."""
    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(UnsupportedModelError, match="plain attention"):
        Decoder(mamba, RolloutConfig())
