"""Whole training steps of every algorithm and option against a plain loop, and what each option is for.

A function that is right by itself can still be given the wrong tokens: packing puts sequences beside each other, and a
mini-batch is cut into micro-batches of which none knows the whole.
"""

import copy
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.trainer import checkpoint
from actors.trainer.config import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    KlConfig,
    OverlongConfig,
    TrainerConfig,
)
from actors.trainer.learner import Learner
from actors.trainer.own import call
from actors.trainer.presets import PRESETS
from schemas.errors import UserError
from tests.actors.naive_step import NaiveLearner, logprobs_of
from tests.actors.tiny_models import qwen3, samples

SETTING = {"lr": 5e-3, "minibatches": 3, "adam_eps": 1e-3, "micro_batch_tokens": 100, "weight_decay": 0.1}
LOSSES = ("decoupled_ppo", "ppo", "gspo", "sapo", "sapo_sequence", "cispo", "reinforce")
OPTIONS = {
    **{name: {"algorithm": name} for name in PRESETS},
    **{f"loss {name}": {"loss": name, "clip": 0.1, "clip_high": 0.15} for name in LOSSES},
    "dual clip": {"dual_clip": 1.2},
    "tis": {"behaviour_weight": "tis"},
    "icepop": {"behaviour_weight": "icepop"},
    "mis": {"behaviour_weight": "mis"},
    "geometric": {"behaviour_weight": CorrectionConfig(level="sequence", lower=0.8, upper=1.1)},
    "sequence k3": {"behaviour_weight": CorrectionConfig(level="sequence", metric="k3", upper=0.05)},
    "gspo under mis": {"loss": "gspo", "behaviour_weight": "mis"},
    "opsm": {"opsm_threshold": 1e-4},
    "opsm coupled": {"opsm_threshold": 1e-4, "loss": "ppo"},
    "m2po": {"m2po_threshold": 0.01},
    "m2po coupled": {"m2po_threshold": 0.01, "loss": "ppo"},
    "loglinear": {"proximal": "loglinear"},
    "linear": {"proximal": "linear"},
    "rollout": {"proximal": "rollout", "loss": "gspo"},
    "kl in the loss": {"kl": KlConfig(coef=0.3), "reference": "initial"},
    "k2 in the loss, by sequence": {
        "kl": KlConfig(coef=0.3, estimator="k2"),
        "reference": "initial",
        "aggregation": "sequence_mean",
    },
    "kl in the reward": {"kl": KlConfig(coef=0.3, estimator="k1", place="reward"), "reference": "initial"},
    "entropy": {"entropy_coef": 0.05},
    "sequence mean": {"aggregation": "sequence_mean"},
    "constant": {"aggregation": "constant"},
    "tokens by group": {"advantage": AdvantageConfig(mean="none", std="none", token_mean="group", token_std="group")},
    "discount": {"discount": 0.9, "gae_lambda": 0.7},
    "critic": {"critic": CriticConfig(clip=0.05), "discount": 0.95, "gae_lambda": 0.9},
    "overlong": {"overlong": OverlongConfig(tail=0.5)},
    "no reward": {"unfinished": "no_reward"},
}


def near(model, made, spread=0.2, seed=0):
    """The same samples as if a policy near `model` had made them: of several versions, some cut, some with steps."""
    rng = np.random.default_rng(seed)
    out = []
    for s in made:
        with torch.no_grad():
            whole = logprobs_of(model, replace(s, loss_mask=np.ones_like(s.loss_mask))).numpy()
        out.append(
            replace(
                s,
                behaviour_logprobs=(whole + rng.normal(0, spread, len(whole))).astype(np.float32),
                versions=np.sort(rng.integers(3, 8, len(whole))).astype(np.int32),
                finish="length" if rng.random() < 0.3 else "stop",
                token_rewards=rng.normal(0, 0.3, len(whole)).astype(np.float32) if rng.random() < 0.3 else None,
            )
        )
    return out


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_is_that_of_the_plain_loop(name):
    """Three mini-batches, so that the ratios are not all 1; micro-batches smaller than those; shared rows."""
    config = TrainerConfig(**(SETTING | OPTIONS[name]))
    model = qwen3(num_hidden_layers=1)
    made = near(model, samples(groups=3, size=4, seed=3, longest=12))
    made += [
        replace(s, sample_id=f"even-{s.sample_id}", group_id=99, reward=1.0, token_rewards=None, finish="stop")
        for s in made[:3]
    ]  # without a difference: they count in N, and may have no gradient
    learner, twin = Learner(copy.deepcopy(model), config, max_new_tokens=20), NaiveLearner(model, config)
    metrics = learner.step(7, made)
    twin.step(7, made)
    for key, parameter in twin.model.named_parameters():
        torch.testing.assert_close(learner.model.get_parameter(key), parameter, atol=3e-5, rtol=0)
    assert metrics["loss"] == pytest.approx(np.mean(twin.losses), abs=1e-4)
    if config.critic is not None:
        assert learner._critic is not None
        for key, parameter in twin.trunk.named_parameters():
            torch.testing.assert_close(learner._critic.trunk.get_parameter(key), parameter, atol=3e-5, rtol=0)
        torch.testing.assert_close(learner._critic.head_weight.data, twin.head.data[:-1], atol=3e-5, rtol=0)


@pytest.mark.parametrize("name", ["gspo under mis", "m2po", "opsm", "critic", "kl in the reward", "sequence mean"])
def test_how_a_mini_batch_is_cut_changes_nothing(name):
    """Sequences and M2PO's tokens are judged alike, whatever lies beside them in a micro-batch."""
    made = near(qwen3(), samples(groups=4, size=4))
    learners = []
    for cut in (
        {"micro_batch_tokens": 40},
        {"micro_batch_tokens": 4096},
        {"micro_batch_tokens": 4096, "row_tokens": 60},
    ):
        learner = Learner(qwen3(), TrainerConfig(**(SETTING | OPTIONS[name] | cut)), max_new_tokens=20)
        learner.step(0, made)
        learners.append(learner)
    for other in learners[1:]:
        for key, parameter in learners[0].model.named_parameters():
            torch.testing.assert_close(other.model.get_parameter(key), parameter, atol=3e-5, rtol=0)


@pytest.mark.parametrize("name", ["ppo", "dapo", "gspo", "m2po", "kl in the loss"])
def test_an_algorithm_resumes_from_its_checkpoint_bit_for_bit(tmp_path, name):
    """Critic and its optimizer are state; the reference is not, it is version 0 again; order means nothing."""
    config = TrainerConfig(**(SETTING | OPTIONS[name]))
    model = qwen3()
    made = [near(model, samples(seed=step), seed=step) for step in range(4)]
    learner = Learner(copy.deepcopy(model), config, max_new_tokens=20)
    for step in range(4):
        if step == 2:
            checkpoint.save(tmp_path, 2, learner.state_dict())
        learner.step(step, made[step])
    resumed = Learner(copy.deepcopy(model), config, max_new_tokens=20)
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None
    resumed.load_state_dict(loaded[1])
    for step in range(2, 4):
        resumed.step(step, made[step][::-1])
    for key, tensor in learner.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[key]), key


def test_a_critic_learns_the_returns_and_its_values_become_advantages():
    """Explained variance rises from 0, and with it the advantages shrink: what was expected teaches nothing."""
    config = TrainerConfig(algorithm="ppo", lr=3e-3, critic=CriticConfig(clip=None))
    learner = Learner(qwen3(), config)
    made = near(learner.model, samples(groups=2, size=4))
    made = [replace(s, token_rewards=None) for s in made]
    told = [learner.step(0, made) for _ in range(30)]
    assert told[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert told[-1]["explained_variance"] > 0.8
    assert told[-1]["value_loss"] < 0.2 * told[0]["value_loss"]
    assert told[-1]["critic_grad_norm"] > 0


def test_a_state_without_a_critic_lets_one_begin_with_the_policy():
    """A recorded run can be trained on with another algorithm."""
    plain = Learner(qwen3(), TrainerConfig(lr=1e-2))
    plain.step(0, samples())
    learner = Learner(qwen3(), TrainerConfig(algorithm="ppo"))
    learner.load_state_dict(plain.state_dict())
    assert learner._critic is not None
    for key, parameter in learner._critic.trunk.named_parameters():
        assert torch.equal(parameter, plain.model.base_model.get_parameter(key))
        assert parameter is not learner.model.base_model.get_parameter(key)


def test_a_kl_penalty_holds_the_policy_near_its_reference():
    """The same steps with and without: what the penalty is for."""
    made, moved = samples(groups=2), []
    for coef in (0.0, 1.0):
        learner = Learner(qwen3(), TrainerConfig(lr=3e-3, kl=KlConfig(coef=coef), reference="initial"))
        for step in range(10):
            metrics = learner.step(step, made)
        moved.append(metrics["reference_kl"])
    assert moved[1] < 0.3 * moved[0]


def test_an_entropy_bonus_keeps_the_distribution_wide():
    made, entropies = samples(groups=2), []
    for coef in (0.0, 0.5):
        learner = Learner(qwen3(), TrainerConfig(lr=3e-3, entropy_coef=coef))
        for step in range(10):
            metrics = learner.step(step, made)
        entropies.append(metrics["entropy"])
    assert entropies[1] > entropies[0] + 0.1


def test_unfinished_answers_can_be_left_out_of_the_loss():
    """Their tokens are no part of N either; their rewards still are a part of the group's mean."""
    made = [replace(s, finish="length" if i % 4 == 0 else "stop") for i, s in enumerate(samples())]
    masked, by_hand = (Learner(qwen3(), TrainerConfig(**SETTING, unfinished=how)) for how in ("mask", "train"))
    told = masked.step(0, made)
    emptied = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) if s.finish == "length" else s for s in made]
    by_hand.step(0, emptied)
    assert all(map(torch.equal, masked.model.state_dict().values(), by_hand.model.state_dict().values()))
    assert told["tokens_trained"] == sum(s.loss_mask.sum() for s in made if s.finish == "stop")


def test_an_engine_that_reports_no_number_poisons_no_loss():
    """−inf for a token outside top-p, NaN on overflow: such tokens have ratio 1."""
    for loss in LOSSES:
        learner = Learner(qwen3(), TrainerConfig(**SETTING, loss=loss))
        made = near(learner.model, samples())
        for s in made:
            s.behaviour_logprobs[::3] = [-math.inf, math.nan][len(s.tokens) % 2]
        metrics = learner.step(0, made)
        assert metrics["skipped_steps"] == 0, loss
        assert all(math.isfinite(value) for value in metrics.values()), loss
        assert metrics["ratio_mean"] < 3, loss


@pytest.mark.parametrize("name", ["ppo", "m2po", "kl in the loss", "entropy"])
def test_the_graph_of_a_micro_batch_is_gone_before_the_next_is_built(monkeypatch, name):
    """Peak memory is that of one micro-batch, however many there are."""
    learner = Learner(qwen3(), TrainerConfig(**(SETTING | OPTIONS[name] | {"micro_batch_tokens": 40})))
    plain, alive, most = learner._logprobs, weakref.WeakSet(), []

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor
            alive.add(self)

    def watched(*arguments, **keywords):
        most.append(len(alive))
        return plain(*arguments, **keywords)

    monkeypatch.setattr(learner, "_logprobs", watched)
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        learner.step(0, near(learner.model, samples()))
    assert len(most) > 6
    assert set(most) == {0}


OWN = """
def loss(tokens, config):
    ratio = (tokens.logprobs - tokens.proximal).exp()
    return -(tokens.weight * ratio.clamp(0.5, 1.5) * tokens.advantages).sum()

def halved(samples, rewards):
    return [(reward - rewards.mean()) / 2 for reward in rewards]

def of_tokens(samples, rewards):
    return [[reward * t for t in range(len(sample.tokens))] for sample, reward in zip(samples, rewards)]

def mean(tokens, config):
    return tokens.logprobs * tokens.advantages

def short(samples, rewards):
    return rewards[1:]

def broken(samples, rewards):
    return rewards / 0.0

def nothing(samples, rewards):
    rewards.mean()

def words(samples, rewards):
    return ["good"] * len(samples)

def mistyped(tokens, config):
    return tokens.logprob.sum()

def one(samples):
    return [0.0] * len(samples)
"""


def test_a_loss_and_an_advantage_of_ones_own_are_one_file(tmp_path):
    """By import path, relative to the recipe."""
    (tmp_path / "mine.py").write_text(OWN)
    for advantage in ("halved", "of_tokens"):
        config = TrainerConfig(**SETTING, loss="mine.py:loss", advantage={"function": f"mine.py:{advantage}"})
        learner = Learner(qwen3(), config, base=tmp_path)
        before = copy.deepcopy(learner.model.state_dict())
        metrics = learner.step(0, samples())
        assert metrics["optimizer_steps"] == 3
        assert not all(map(torch.equal, before.values(), learner.model.state_dict().values()))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"loss": "mine.py:mean"}, "returned a tensor of shape"),
        ({"loss": "mine.py:los"}, "no function los"),
        ({"advantage": {"function": "mine.py:short"}}, "15 advantages for 16 samples"),
        ({"advantage": {"function": "mine.py:broken"}}, "not finite"),
        ({"advantage": {"function": "mine.py:nothing"}}, "a NoneType, not advantages for 16 samples"),
        ({"advantage": {"function": "mine.py:words"}}, "no numbers for sample .*'good'"),
        ({"advantage": {"function": "mine.py:one"}}, "one raised TypeError: .* 1 positional argument but 2 were given"),
        ({"loss": "mine.py:mistyped"}, r"mistyped raised AttributeError in .*mine.py, line 28: .*'logprob'"),
        ({"reference": "./nowhere"}, "no model folder"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_what_is_wrong_with_ones_own_function_is_said(tmp_path, config, says):
    """The user reads this at step 0, not a traceback at step 300."""
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(UserError, match=says):
        Learner(qwen3(), TrainerConfig(**config), base=tmp_path).step(0, samples())


def test_want_of_memory_in_ones_own_loss_is_no_fault_of_its_line():
    """The next try may find room, so the process begins anew; as an error of the user's it would end the run."""

    for kind in (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):

        def hungry(kind=kind):
            raise kind("out of memory")

        with pytest.raises(kind):
            call("The loss", hungry)
