"""Every entry of golden/areal.json: the numbers of the reference at 1e-5, or the right ones where it is at fault.

A golden without a check would be a promise that nobody keeps: one test walks over all keys of the file.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from actors.trainer.advantages import normalise
from actors.trainer.config import AdvantageConfig, CorrectionConfig, KlConfig, TrainerConfig
from actors.trainer.corrections import behaviour_weight
from actors.trainer.credit import Values, assign
from actors.trainer.gae import gae
from actors.trainer.kl import kl
from actors.trainer.losses.gspo import gspo
from actors.trainer.losses.ppo import ppo
from actors.trainer.losses.sapo import sapo, sapo_sequence
from actors.trainer.m2po import second_moment_mask
from actors.trainer.overlong import overlong_penalty
from actors.trainer.packing import first_fit_decreasing
from actors.trainer.proximal import approximate
from actors.trainer.samples import TrainSample
from actors.trainer.value_loss import value_loss
from tests.actors.golden_policy import GOLDEN, in_rows, inputs

CHECKS: dict[str, Callable[[], None]] = {}
REWARDS = [1.0, 0, 0, 1, 1, 1, 1, 0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]


def check(*names):
    def register(function):
        for name in names:
            CHECKS[name] = lambda n=name: function(n)
        return function

    return register


@pytest.mark.parametrize("name", GOLDEN)
def test_the_numbers_of_the_reference_are_ours_too(name):
    assert name in CHECKS, f"the golden {name} has no check"
    CHECKS[name]()


def test_no_check_is_left_without_its_golden():
    """A renamed key would otherwise fall silent."""
    assert set(CHECKS) <= set(GOLDEN)


# ---- policy losses


def same_loss(name, x, loss):
    golden = GOLDEN[name]
    mean = loss.total / len(x.adv)
    mean.backward()
    assert mean.item() == pytest.approx(golden["loss"], abs=1e-5)
    if "grad" in golden:
        assert in_rows(x.theta.grad, x.mask) == pytest.approx(golden["grad"], abs=1e-5)
    assert int(loss.clipped.sum()) == golden.get("clip_tokens", int(loss.clipped.sum()))
    assert int(loss.dual_clipped.sum()) == golden.get("dual_clip_tokens", 0)


CORRECTIONS = {
    "ppo_rs_token_mask_5": {},
    "ppo_rs_token_mask_2": {"upper": 2},
    "ppo_rs_token_mask_0.7_2": {"lower": 0.7, "upper": 2},
    "ppo_rs_token_clamp_2": {"action": "clamp", "upper": 2},
    "ppo_rs_seq_mask_mean_1.3": {"level": "sequence", "upper": 1.3},
    "ppo_rs_seq_clamp_mean_1.1": {"level": "sequence", "action": "clamp", "upper": 1.1},
    "ppo_rs_seq_mask_max_2": {"level": "sequence", "aggregate": "max", "upper": 2},
    "ppo_rs_seq_mask_sum_5": {"level": "sequence", "aggregate": "sum", "upper": 5},
    "ppo_rs_token_k2_mask_0.5": {"metric": "k2", "upper": 0.5},
    "ppo_rs_token_k3_mask_0.5": {"metric": "k3", "upper": 0.5},
    "ppo_rs_token_k1_mask_0.3": {"metric": "k1", "upper": 0.3},
    "ppo_rs_seq_k3_mean_0.3": {"level": "sequence", "metric": "k3", "upper": 0.3},
}


@check(*CORRECTIONS)
def decoupled_ppo_under_each_correction(name):
    """What is masked, what is weighted and what the mean is over."""
    x = inputs()
    corrected = behaviour_weight(x.prox, x.behav, x.sequence, 2, CorrectionConfig(**CORRECTIONS[name]))
    same_loss(name, x, ppo(x.theta, x.prox, x.adv, clip=0.2, weight=corrected.weight))
    assert in_rows(corrected.weight, x.mask) == pytest.approx(GOLDEN[name]["behave_w"], abs=1e-5)
    assert corrected.changed.float().mean().item() == pytest.approx(GOLDEN[name]["filtered"])


@check("ppo_no_rs")
def ppo_clips_around_the_proximal_policy(name):
    x = inputs()
    same_loss(name, x, ppo(x.theta, x.prox, x.adv, clip=0.2))


@check("ppo_on_policy_style_prox_eq_behav")
def naive_ppo_clips_around_the_behaviour_policy(name):
    x = inputs()
    same_loss(name, x, ppo(x.theta, x.behav, x.adv, clip=0.2))


@check("ppo_clip_higher_0.28")
def clip_higher_leaves_more_room_above(name):
    x = inputs()
    same_loss(name, x, ppo(x.theta, x.prox, x.adv, clip=0.2, clip_high=0.28))


@check("ppo_dual_clip_3_theta_row1_plus_1.6")
def dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely(name):
    x = inputs(theta_row1_plus=1.6)
    same_loss(name, x, ppo(x.theta, x.prox, x.adv, clip=0.2, dual_clip=3.0))


@check("gspo_seq")
def gspo_has_one_ratio_a_sequence(name):
    x = inputs()
    same_loss(name, x, gspo(x.theta, x.prox, x.adv, x.sequence, 2, clip=0.2))


@check("gspo_packed_seq_rs_1.3")
def gspo_beside_another_sequence_takes_the_correction_too(name):
    x = inputs()
    corrected = behaviour_weight(x.prox, x.behav, x.sequence, 2, CorrectionConfig(level="sequence", upper=1.3))
    same_loss(name, x, gspo(x.theta, x.prox, x.adv, x.sequence, 2, clip=0.2, weight=corrected.weight))


@check("sapo_token")
def sapo_gates_tokens(name):
    x = inputs()
    same_loss(name, x, sapo(x.theta, x.behav, x.adv))


@check("sapo_sequence")
def sapo_gates_sequences(name):
    x = inputs()
    same_loss(name, x, sapo_sequence(x.theta, x.behav, x.adv, x.sequence, 2))


@check("inputs", "adv_inputs", "adv_multiturn_inputs")
def the_inputs_of_other_entries_are_there(name):
    assert GOLDEN[name]


@check("kl_k1", "kl_k2", "kl_k3")
def kl_estimators(name):
    theta, prox = (torch.tensor(GOLDEN["inputs"][key][0]) for key in ("theta", "prox"))
    assert kl(theta, prox, name.removeprefix("kl_")).tolist() == pytest.approx(GOLDEN[name], abs=1e-5)


@check("m2po_thr0.04_mask", "m2po_thr1e-6_mask", "m2po_thr10_mask")
def m2po_masks_the_fewest_tokens(name):
    x = inputs()
    keep = second_moment_mask(x.prox, x.behav, float(name.removeprefix("m2po_thr").removesuffix("_mask")))
    assert in_rows(keep, x.mask) == np.ravel(GOLDEN[name]).tolist()


@check("prox_approx")
def proximal_approximations_by_the_version_of_each_token(name):
    golden = GOLDEN[name]
    theta, behav = (torch.tensor(GOLDEN["inputs"][key]) for key in ("theta", "behav"))
    versions = torch.tensor(golden["versions"])
    for how in ("loglinear", "linear", "rollout"):
        ours = approximate(how, behav, theta, versions, golden["current_version"])
        np.testing.assert_allclose(ours, golden[how], atol=1e-5, err_msg=how)


@check("critic_mse", "critic_huber")
def the_critic_learns_the_clipped_distance_to_the_return(name):
    given = GOLDEN["critic_mse"]
    value, old, target = (torch.tensor(given[key][0]) for key in ("value", "old", "target"))
    loss = value_loss(value, old, target, clip=given["eps"], kind=name.removeprefix("critic_"))
    assert loss.total.item() / 3 == pytest.approx(GOLDEN[name]["loss"], abs=1e-5)
    assert loss.clipped.tolist() == [bool(clipped) for clipped in given["clip"]]


# ---- rewards and advantages


@check("overlong")
def long_answers_pay(name):
    golden = GOLDEN[name]
    penalty = overlong_penalty(
        golden["resp_len"],
        max_new_tokens=golden["max_response_length"],
        tail=golden["overlong_tokens"],
        factor=golden["factor"],
    )
    np.testing.assert_allclose(np.add(golden["rewards_in"], penalty), golden["rewards_out"], atol=1e-5)


PRESETS = {
    "norm_group_mean_group_std_G4": {},
    "norm_group_mean_group_std_biased_G4": {"unbiased": False},
    "norm_group_mean_no_std_G4(DrGRPO)": {"std": "none"},
    "norm_group_loo_no_std_G4(RLOO)": {"std": "none", "leave_one_out": True},
    "norm_group_mean_batch_std_G4(LitePPO)": {"std": "batch"},
    "norm_batch_batch": {"mean": "batch", "std": "batch"},
}


@check(*PRESETS)
def each_way_to_normalise_rewards(name):
    """These are the published algorithms; another denominator would be another algorithm."""
    np.testing.assert_allclose(normalise(REWARDS, GROUPS, **PRESETS[name]), GOLDEN[name], atol=1e-5)


@check("norm_token_batch_masked", "norm_token_group_masked_G1")
def tokens_are_normalised_by_the_same_function(name):
    """Masked tokens (3 and 4) are left out; the reference leaves them at 0."""
    how = {"mean": "batch", "std": "batch"} if "batch" in name else {}
    golden = np.delete(GOLDEN[name], [3, 4])
    np.testing.assert_allclose(normalise([0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], **how), golden, atol=1e-5)


@check("norm_group_remainder_bs7_G4(BUG: tail /eps)")
def an_incomplete_last_group_is_a_group_and_no_division_by_eps(name):
    """The reference cuts groups by position and blows the tail up to 1e5; ours goes by id."""
    wrong, right = GOLDEN[name], normalise(REWARDS[:7], GROUPS[:7])
    np.testing.assert_allclose(right[:4], wrong[:4], atol=1e-5)
    assert max(wrong) == 100000.0
    np.testing.assert_array_equal(right[4:], 0.0)


RAW = {"advantage": AdvantageConfig(mean="none", std="none")}
KL = {"kl": KlConfig(coef=0.1, estimator="k1", place="reward"), "reference": "initial"}
TRAINERS = {
    "adv_plain": {},
    "adv_bias-0.5_scale10_clip20": {"reward_bias": -0.5, "reward_scale": 10, "reward_clip": 20},
    "adv_discount0.9_lambda0.8": {"discount": 0.9, "gae_lambda": 0.8},
    "adv_kl0.1_k1_with_ref": KL,
    "adv_critic_values_g0.9_l0.8": {"discount": 0.9, "gae_lambda": 0.8},
    "adv_mask_no_eos": {"unfinished": "no_reward"},
    "adv_adv_norm_batch": {
        "advantage": AdvantageConfig(mean="none", std="none", token_mean="batch", token_std="batch")
    },
}


def golden_samples():
    """The reference's two rows as samples: a row that fills the batch's width was cut, the other one ended."""
    given = GOLDEN["adv_inputs"]
    for i, (mask, attention) in enumerate(zip(given["loss_mask"], given["attention_mask"], strict=True)):
        start, end = mask.index(1), sum(attention)
        yield TrainSample(
            sample_id=f"row{i}",
            group_id=i,
            prompt_tokens=np.ones(start, np.int32),
            tokens=np.ones(end - start, np.int32),
            behaviour_logprobs=np.array(given["logprobs"][i][start:end], np.float32),
            loss_mask=np.array(mask[start:end], np.bool_),
            reward=given["rewards"][i],
            finish="length" if end == len(mask) else "stop",
            versions=np.array(given["versions"][i][start:end], np.int32),
        )


@check(*TRAINERS)
def from_rewards_to_the_advantages_of_tokens(name):
    """Position t of the reference predicts token t + 1: its arrays are shifted, ours begin with the response."""
    golden = GOLDEN[name]
    samples, config = list(golden_samples()), TrainerConfig(**(RAW | TRAINERS[name]))
    places = np.array(golden["loss_mask"], bool)
    advantages, returns = np.array(golden["advantages"]), np.array(golden["returns"])
    penalties = values = None
    if config.kl.coef:
        penalties = [-np.array(row)[m] / config.kl.coef for row, m in zip(golden["kl_rewards"], places, strict=True)]
    if "critic" in name:
        of_all = returns - advantages
        values = Values([row[m] for row, m in zip(of_all, places, strict=True)], of_all[:, -1])
    credit = assign(samples, config, reference_kl=penalties, values=values)
    for i in range(2):
        np.testing.assert_allclose(credit.advantages[i], advantages[i][places[i]], atol=1e-5)
        np.testing.assert_allclose(credit.returns[i], returns[i][places[i]], atol=1e-5)
        behaviour = np.array(golden["logprobs"][i])[places[i]]
        np.testing.assert_allclose(samples[i].behaviour_logprobs[samples[i].loss_mask], behaviour, atol=1e-6)


@check("adv_multiturn_g0.9_l1")
def masked_tokens_between_turns_do_not_discount(name):
    golden, given = GOLDEN[name], GOLDEN["adv_multiturn_inputs"]
    mask = np.array(given["loss_mask"][0], bool)
    places = np.array(golden["loss_mask"][0], bool)
    expected = np.array(golden["advantages"][0])
    sample = TrainSample(
        "turns",
        0,
        np.ones(2, np.int32),
        np.ones(6, np.int32),
        np.zeros(6, np.float32),
        mask[2:],
        given["reward"],
    )
    credit = assign([sample], TrainerConfig(**RAW, discount=0.9))
    np.testing.assert_allclose(credit.advantages[0], expected[places], atol=1e-5)
    rows = gae(golden["tot_rewards"], np.zeros((1, 8)), places[None], [0.0], discount=0.9, gae_lambda=1.0)[0]
    np.testing.assert_allclose(rows[0], expected, atol=1e-5)  # a masked token carries the advantage of what follows


# ---- packing


@check("ffd", "ffd_min4")
def bins_by_first_fit_decreasing(name):
    given = GOLDEN["ffd"]
    groups = given["groups"] if name == "ffd" else GOLDEN[name]
    least = given["min_groups"] if name == "ffd" else 4
    assert first_fit_decreasing(given["values"], given["capacity"], least) == groups


@check("kk")
def as_many_bins_are_as_even_as_those_of_karmarkar_and_karp(name):
    given = GOLDEN["ffd"]
    ours = first_fit_decreasing(given["values"], given["capacity"], len(GOLDEN[name]))
    assert sorted(ours) == sorted(GOLDEN[name])


@check("greedy_K2")
def a_split_in_two_is_as_even_and_loses_no_sequence(name):
    """The reference makes both halves of equal number, and so leaves one sequence of seven out."""
    values = GOLDEN["ffd"]["values"]
    assert sorted(i for half in GOLDEN[name] for i in half) == [0, 1, 2, 3, 4, 5]
    ours = first_fit_decreasing(values, sum(values), 2)
    assert sorted(i for half in ours for i in half) == list(range(7))
    loads, theirs = ([sum(values[i] for i in half) for half in halves] for halves in (ours, GOLDEN[name]))
    assert abs(loads[0] - loads[1]) <= abs(theirs[0] - theirs[1])
