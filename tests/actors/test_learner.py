import copy
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from actors.trainer import checkpoint
from actors.trainer.advantages import normalise
from actors.trainer.config import CorrectionConfig, TrainerConfig
from actors.trainer.learner import Learner
from actors.trainer.optimizer import schedule
from actors.trainer.samples import TrainSample
from tests.actors.tiny_models import gpt2, qwen3, samples

CONFIG = TrainerConfig(lr=1e-3, minibatches=2, micro_batch_tokens=128)


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def alone(model, sample, temperature=1.0):
    """Logprobs [T] of one unpadded, unpacked response, in the model's own precision, differentiable."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_tokens, sample.tokens])).long()
    table = torch.log_softmax(model(input_ids=ids[None]).logits[0] / temperature, -1)
    return table[:-1].gather(1, ids[1:, None])[len(sample.prompt_tokens) - 1 :, 0]


def with_logprobs_of(model, made):
    """The same samples as if `model` itself had generated them."""
    with torch.no_grad():
        return [replace(s, behaviour_logprobs=alone(model, s).numpy()) for s in made]


def naive_loss(model, prox, made, advantages, config):
    """Decoupled PPO spelled out token by token, of one mini-batch."""
    total, N = torch.zeros((), dtype=model.dtype), sum(int(s.loss_mask.sum()) for s in made)
    for s in made:
        theta, p, mask = alone(model, s), prox[s.sample_id], torch.from_numpy(s.loss_mask)
        ratio, A = (theta - p).exp(), advantages[s.sample_id]
        surrogate = torch.minimum(ratio * A, ratio.clamp(1 - config.clip, 1 + config.clip) * A)
        if config.loss == "decoupled_ppo":
            w = (p - torch.from_numpy(s.behaviour_logprobs)).exp()
            surrogate = torch.where(w <= config.behaviour_weight.upper, w, 0.0) * surrogate
        total = total - surrogate[mask].sum()
    return total / N


def naive_inputs(model, made, config):
    ordered = sorted(made, key=lambda s: (s.group_id, s.sample_id))
    values = normalise([s.reward for s in ordered], [s.group_id for s in ordered])
    advantages = {s.sample_id: float(v) for s, v in zip(ordered, values, strict=True)}
    with torch.no_grad():
        prox = {s.sample_id: alone(model, s) for s in ordered}
    if config.loss == "ppo":
        prox = {s.sample_id: torch.from_numpy(s.behaviour_logprobs) for s in ordered}
    return ordered, advantages, prox


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    micro_batch_tokens=st.sampled_from([40, 100, 4096]),
    row_tokens=st.sampled_from([0, 40]),
    loss=st.sampled_from(["decoupled_ppo", "ppo"]),
)
def test_packed_and_micro_batched_gradients_equal_one_unpacked_float64_pass(seed, micro_batch_tokens, row_tokens, loss):
    """Packing, skipping and accumulating save work; they must not change what is learned."""
    config = TrainerConfig(micro_batch_tokens=micro_batch_tokens, row_tokens=row_tokens, loss=loss, grad_clip=1e9)
    made = samples(groups=3, size=4, seed=seed)
    made += [replace(s, sample_id=f"even-{s.sample_id}", group_id=99, reward=1.0) for s in made[:3]]  # no gradient
    learner = Learner(gpt2(), config)
    exact = copy.deepcopy(learner.model).double()
    ordered, advantages, prox = naive_inputs(exact, made, config)
    naive_loss(exact, prox, ordered, advantages, config).backward()

    gradients = {}
    learner._optimizer.adam.step = lambda: gradients.update(
        {n: p.grad.clone() for n, p in learner.model.named_parameters()}
    )
    learner.step(0, made)
    expected = {n: p.grad for n, p in exact.named_parameters()}
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.double(), expected[name], atol=2e-5 * scale, rtol=0)


@pytest.mark.parametrize("loss", ["decoupled_ppo", "ppo"])
def test_a_step_of_three_mini_batches_is_that_of_a_naive_loop(loss):
    """Proximal logprobs are those before the step for every mini-batch, and N is each mini-batch's own."""
    config = TrainerConfig(lr=5e-3, minibatches=3, loss=loss, adam_eps=1e-3, micro_batch_tokens=100, weight_decay=0.1)
    made = samples(groups=5, size=4, seed=3)
    learner = Learner(qwen3(), config)
    twin = copy.deepcopy(learner.model)
    ordered, advantages, prox = naive_inputs(twin, made, config)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=5e-3, betas=config.betas, eps=1e-3, weight_decay=0.1)
    losses = []
    for members in np.array_split(np.random.default_rng((config.seed, 7)).permutation(len(ordered)), 3):
        loss_value = naive_loss(twin, prox, [ordered[i] for i in members], advantages, config)
        optimizer.zero_grad()
        loss_value.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), config.grad_clip)
        optimizer.step()
        losses.append(loss_value.item())

    metrics = learner.step(7, made)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(learner.model.get_parameter(name), parameter, atol=2e-5, rtol=0)
    assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert metrics["ratio_mean"] != 1.0


@given(order=st.randoms(use_true_random=False))
@settings(max_examples=5, deadline=None)
def test_the_order_of_samples_does_not_change_a_single_bit(order):
    """Samples arrive as workers finish; replay must still give the same weights (I7)."""
    made = samples()
    reference, shuffled = Learner(qwen3(), CONFIG), Learner(qwen3(), CONFIG)
    other = list(made)
    order.shuffle(other)
    for step in range(2):
        told, told_other = reference.step(step, made), shuffled.step(step, other)
    assert same_bits(weights(reference), weights(shuffled))
    clocks = {name: 0.0 for name in told if name.startswith("seconds_")}
    assert told | clocks == told_other | clocks


@pytest.mark.parametrize("correction", [CorrectionConfig(), CorrectionConfig(level="sequence", upper=2.0)])
def test_training_resumed_from_a_checkpoint_continues_bit_for_bit(tmp_path, correction):
    """Recovery loads the newest checkpoint and replays the batches after it: that must be the same run."""
    config = CONFIG.model_copy(update={"behaviour_weight": correction, "warmup_steps": 10, "weight_decay": 0.1})
    learner = Learner(qwen3(), config)
    for step in range(2):
        learner.step(step, samples(seed=step))
    checkpoint.save(tmp_path, learner.steps_done, learner.state_dict())
    for step in range(2, 4):
        learner.step(step, samples(seed=step))

    resumed = Learner(qwen3(seed=99), config)
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None
    resumed.load_state_dict(loaded[1])
    assert resumed.steps_done == loaded[0] == 2
    for step in range(2, 4):
        resumed.step(step, samples(seed=step))
    assert same_bits(weights(learner), weights(resumed))


def test_a_config_that_was_changed_holds_from_the_checkpoint_on():
    """torch's optimizer takes betas and weight decay from the loaded state, and a resume would ignore the recipe's."""
    learner = Learner(qwen3(), CONFIG)
    learner.step(0, samples())
    changed = CONFIG.model_copy(update={"weight_decay": 0.5, "betas": (0.5, 0.6)})
    resumed, same = Learner(qwen3(), changed), Learner(qwen3(), CONFIG)
    for other in (resumed, same):
        other.load_state_dict(copy.deepcopy(learner.state_dict()))
        other.step(1, samples(seed=1))
    learner.step(1, samples(seed=1))
    assert same_bits(weights(learner), weights(same))
    assert not same_bits(weights(learner), weights(resumed))


def test_the_seed_and_the_step_choose_the_mini_batches():
    """Otherwise the same samples would always share a mini-batch."""
    by_step, by_seed = Learner(qwen3(), CONFIG), Learner(qwen3(), CONFIG.model_copy(update={"seed": 1}))
    reference = Learner(qwen3(), CONFIG)
    reference.step(0, samples())
    by_step.step(1, samples())
    by_seed.step(0, samples())
    assert not same_bits(weights(reference), weights(by_step))
    assert not same_bits(weights(reference), weights(by_seed))


def test_a_rewarded_answer_becomes_likelier():
    """The sign of the whole chain."""
    model = qwen3()
    learner = Learner(model, TrainerConfig(lr=1e-3))
    made = samples(groups=2)
    good, bad = next(s for s in made if s.reward == 1), next(s for s in made if s.reward == 0)
    with torch.no_grad():
        before = alone(model, good).sum(), alone(model, bad).sum()
    for step in range(5):
        learner.step(step, with_logprobs_of(model, made))
    with torch.no_grad():
        assert alone(model, good).sum() > before[0]
        assert alone(model, bad).sum() < before[1]


def test_on_policy_samples_have_weight_one_and_no_mismatch():
    """What a person looks at first when engine and trainer disagree."""
    learner = Learner(qwen3(), TrainerConfig())
    made = with_logprobs_of(learner.model, samples())
    metrics = learner.step(0, made)
    exact = {"behaviour_weight_mean": 1, "behaviour_weight_max": 1, "ess": 1, "ratio_mean": 1}
    exact |= {"clip_fraction": 0, "masked_fraction": 0, "mismatch_kl": 0, "prox_kl": 0, "skipped_steps": 0}
    assert {name: metrics[name] for name in exact} == pytest.approx(exact, abs=1e-5)
    assert 0 < metrics["entropy"] < math.log(31)
    assert metrics["tokens_trained"] == metrics["tokens_with_gradient"] == sum(s.loss_mask.sum() for s in made)
    assert metrics["tokens_packed"] == sum(len(s.prompt_tokens) + len(s.tokens) for s in made)
    assert metrics["reward_mean"] == 0.5
    assert metrics["samples"] == metrics["samples_with_gradient"] == 16


def test_an_engine_that_disagrees_shows_in_the_metrics():
    """Half the tokens are a factor of e⁻¹ off, one in eight a factor of e²: the cap is at 5."""
    learner = Learner(qwen3(), TrainerConfig())
    made = []
    for s in with_logprobs_of(learner.model, samples()):
        shift = np.where(np.arange(len(s.tokens)) % 8 == 0, -2.0, np.where(np.arange(len(s.tokens)) % 2, 1.0, 0.0))
        made.append(replace(s, behaviour_logprobs=s.behaviour_logprobs + shift.astype(np.float32)))
    shifts = np.concatenate(
        [np.where(np.arange(len(s.tokens)) % 8 == 0, -2.0, np.arange(len(s.tokens)) % 2)[s.loss_mask] for s in made]
    )
    w = np.where(shifts == -2, 0.0, np.exp(-shifts))
    metrics = learner.step(0, made)
    assert metrics["masked_fraction"] == pytest.approx((shifts == -2).mean())
    assert metrics["behaviour_weight_mean"] == pytest.approx(w.mean(), abs=1e-4)
    assert metrics["ess"] == pytest.approx(w.sum() ** 2 / (w**2).sum() / len(w), abs=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx((np.exp(-shifts) - 1 + shifts).mean(), rel=1e-3)


def test_groups_without_a_difference_cost_nothing_and_move_nothing():
    """A step on zero gradients would still drift by momentum and weight decay."""
    learner = Learner(qwen3(), CONFIG.model_copy(update={"weight_decay": 0.1}))
    learner.step(0, samples())
    before = weights(learner)
    even = [replace(s, reward=[0.1 + 0.2, 0.3][i % 2]) for i, s in enumerate(samples())]
    metrics = learner.step(1, even)
    assert same_bits(before, weights(learner))
    assert metrics["samples_with_gradient"] == metrics["tokens_packed"] == metrics["optimizer_steps"] == 0
    assert metrics["zero_variance_groups"] == 4
    assert metrics["tokens_trained"] > 0
    assert learner.step(2, [])["samples"] == 0


def test_masked_tokens_change_nothing_not_even_with_broken_logprobs():
    """A tool's token has no behaviour logprob; engines fill in anything."""
    clean, dirty = Learner(qwen3(), CONFIG), Learner(qwen3(), CONFIG)
    clean.step(0, samples())
    dirty.step(
        0,
        [
            replace(s, behaviour_logprobs=np.where(s.loss_mask, s.behaviour_logprobs, np.nan).astype(np.float32))
            for s in samples()
        ],
    )
    assert same_bits(weights(clean), weights(dirty))


def test_a_gradient_that_is_not_finite_skips_the_step_loudly():
    """One NaN in the weights ends a run; a skipped step costs a step."""
    learner = Learner(qwen3(), CONFIG)
    before = weights(learner)
    handle = next(learner.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
    with capture_logs() as logs:
        metrics = learner.step(4, samples())
    assert same_bits(before, weights(learner))
    assert metrics["skipped_steps"] == 2
    assert [(entry["event"], entry["log_level"], entry["step"]) for entry in logs] == [
        ("optimizer_step_skipped", "warning", 4)
    ] * 2
    handle.remove()
    learner.step(5, samples())
    assert not same_bits(before, weights(learner))


def test_the_learning_rate_warms_up_linearly_over_training_steps():
    learner = Learner(qwen3(), TrainerConfig(lr=1e-3, warmup_steps=4))
    assert [learner.step(step, samples(groups=1))["lr"] for step in (0, 1, 3, 9)] == [2.5e-4, 5e-4, 1e-3, 1e-3]


def test_bfloat16_autocast_trains_in_the_same_direction():
    exact, rounded = Learner(qwen3(), TrainerConfig()), Learner(qwen3(), TrainerConfig(autocast="bfloat16"))
    moves = []
    for learner in (exact, rounded):
        gradients = []
        learner._optimizer.adam.step = lambda g=gradients, m=learner.model: g.extend(
            p.grad.flatten() for p in m.parameters()
        )
        learner.step(0, samples())
        moves.append(torch.cat(gradients))
    assert torch.nn.functional.cosine_similarity(*moves, dim=0) > 0.95


def test_a_sample_listed_twice_is_refused():
    """Trained twice, it would break I3 unseen."""
    made = samples()
    with pytest.raises(ValueError, match="twice"):
        Learner(qwen3(), CONFIG).step(0, [*made, random.choice(made)])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loss_mask": np.ones(2, dtype=np.bool_)}, "one length"),
        ({"prompt_tokens": np.empty(0, dtype=np.int32)}, "at least one token"),
        ({"reward": math.nan}, "not finite"),
    ],
)
def test_a_malformed_sample_is_refused_by_name(change, says):
    good = TrainSample(
        "s7", 0, np.ones(2, np.int32), np.ones(3, np.int32), np.zeros(3, np.float32), np.ones(3, np.bool_), 1
    )
    with pytest.raises(ValueError, match=f"s7.*{says}"):
        replace(good, **change)


def test_greedy_rollouts_are_refused():
    """They have no distribution to take a ratio of."""
    with pytest.raises(ValueError, match="temperature"):
        Learner(qwen3(), CONFIG, temperature=0.0)


def test_the_learning_rate_warms_up_and_decays_linearly_to_its_floor() -> None:
    """Constant noise at the end of a run would cost the last percent; without decay_steps nothing changes."""
    constant = TrainerConfig(warmup_steps=4)
    assert [schedule(step, constant) for step in (0, 1, 3, 100)] == [0.25, 0.5, 1.0, 1.0]
    decaying = TrainerConfig(warmup_steps=0, decay_steps=10, min_lr_ratio=0.1)
    assert [schedule(step, decaying) for step in (0, 5, 10, 50)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_layers_computed_again_give_the_same_weights() -> None:
    """Memory for compute, and nothing else: the model stays in eval mode."""
    learners = [
        Learner(qwen3(), CONFIG.model_copy(update={"gradient_checkpointing": again})) for again in (False, True)
    ]
    calls = [0, 0]
    for place, learner in enumerate(learners):

        def count(*_: object, place: int = place) -> None:
            calls[place] += torch.is_grad_enabled()

        learner.model.base_model.layers[0].self_attn.register_forward_hook(count)
        learner.step(0, samples())
    assert calls[1] == 2 * calls[0] > 0
    assert same_bits(*map(weights, learners))
    assert not learners[1].model.base_model.layers[0].self_attn.training
