import pytest
import torch

from actors.trainer.config import CorrectionConfig
from actors.trainer.corrections import behaviour_weight
from actors.trainer.kl import kl
from actors.trainer.losses.ppo import ppo
from tests.actors.golden_policy import GOLDEN, in_rows, inputs

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


def check(name, x, loss):
    golden = GOLDEN[name]
    mean = loss.total / len(x.adv)
    mean.backward()
    assert mean.item() == pytest.approx(golden["loss"], abs=1e-5)
    assert in_rows(x.theta.grad, x.mask) == pytest.approx(golden["grad"], abs=1e-5)
    assert int(loss.clipped.sum()) == golden["clip_tokens"]
    assert int(loss.dual_clipped.sum()) == golden.get("dual_clip_tokens", 0)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_decoupled_ppo_gives_the_loss_weights_and_gradient_of_the_reference(name):
    """The paper's loss under each correction: what is masked, what is weighted and what the mean is over."""
    x = inputs()
    corrected = behaviour_weight(x.prox, x.behav, x.sequence, 2, CorrectionConfig(**CORRECTIONS[name]))
    check(name, x, ppo(x.theta, x.prox, x.adv, clip=0.2, weight=corrected.weight))
    assert in_rows(corrected.weight, x.mask) == pytest.approx(GOLDEN[name]["behave_w"], abs=1e-5)
    assert corrected.changed.float().mean().item() == pytest.approx(GOLDEN[name]["filtered"])


def test_every_golden_of_clipped_ppo_is_reproduced():
    """A golden without a test would be a promise nobody checks."""
    others = {"ppo_no_rs", "ppo_on_policy_style_prox_eq_behav", "ppo_clip_higher_0.28"}
    others.add("ppo_dual_clip_3_theta_row1_plus_1.6")
    assert {name for name in GOLDEN if name.startswith("ppo_")} == others | set(CORRECTIONS)


def test_ppo_clips_around_the_proximal_policy():
    x = inputs()
    check("ppo_no_rs", x, ppo(x.theta, x.prox, x.adv, clip=0.2))


def test_naive_ppo_clips_around_the_behaviour_policy():
    x = inputs()
    check("ppo_on_policy_style_prox_eq_behav", x, ppo(x.theta, x.behav, x.adv, clip=0.2))


def test_clip_higher_leaves_more_room_above():
    x = inputs()
    check("ppo_clip_higher_0.28", x, ppo(x.theta, x.prox, x.adv, clip=0.2, clip_high=0.28))


def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely():
    x = inputs(theta_row1_plus=1.6)
    check("ppo_dual_clip_3_theta_row1_plus_1.6", x, ppo(x.theta, x.prox, x.adv, clip=0.2, dual_clip=3.0))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_give_the_numbers_of_the_reference(estimator):
    theta, prox = (torch.tensor(GOLDEN["inputs"][name][0]) for name in ("theta", "prox"))
    assert kl(theta, prox, estimator).tolist() == pytest.approx(GOLDEN[f"kl_{estimator}"], abs=1e-5)


def test_kl_is_clamped_so_that_one_token_cannot_dominate():
    assert kl(torch.tensor([-50.0, 0.0]), torch.tensor([0.0, -50.0]), "k1").tolist() == [-10.0, 10.0]
    assert kl(torch.tensor([-50.0]), torch.tensor([0.0]), "k3").tolist() == [10.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_became_e_to_the_200_more_likely_gives_a_finite_gradient(advantage):
    """exp(200) is inf in float32, and the branch that is not taken would contribute 0·inf = NaN."""
    theta = torch.tensor([0.0, -0.5], requires_grad=True)
    ppo(theta, torch.tensor([-200.0, -0.5]), torch.tensor([advantage, 1.0]), clip=0.2).total.backward()
    assert theta.grad is not None
    assert theta.grad.isfinite().all()
    assert theta.grad[1].item() == -1.0


def test_the_loss_is_a_sum_so_that_micro_batches_add_up():
    """N is the mini-batch's; a mean per micro-batch would weight short ones more."""
    x = inputs()
    whole = ppo(x.theta, x.prox, x.adv, clip=0.2).total
    parts = [ppo(x.theta[s], x.prox[s], x.adv[s], clip=0.2).total for s in (slice(0, 3), slice(3, 8))]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)
