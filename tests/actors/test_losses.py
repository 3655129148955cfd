"""Losses and masks against a float64 twin that loops over tokens, gradients against central differences of that twin.

A loss that is wrong by a sign or a factor still trains, only worse: nothing else would show it.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.gae import gae
from actors.trainer.kl import kl
from actors.trainer.losses.cispo import cispo
from actors.trainer.losses.gspo import gspo
from actors.trainer.losses.ppo import ppo
from actors.trainer.losses.reinforce import reinforce
from actors.trainer.losses.sapo import sapo, sapo_sequence
from actors.trainer.m2po import second_moment_mask
from actors.trainer.opsm import off_policy_sequences
from actors.trainer.proximal import approximate
from actors.trainer.value_loss import value_loss
from tests.actors import naive_losses as naive

# name: (the loss on tensors, its twin, their arguments)
LOSSES = {
    "ppo": (lambda t, x, **a: ppo(t, x["proximal"], x["advantages"], weight=x["weight"], **a), naive.ppo),
    "gspo": (
        lambda t, x, **a: gspo(
            t, x["proximal"], x["advantages"], x["sequence"], int(x["sequence"].max()) + 1, weight=x["weight"], **a
        ),
        naive.gspo,
    ),
    "sapo": (
        lambda t, x, positive=1.0, negative=1.05: sapo(
            t, x["behaviour"], x["advantages"], tau_positive=positive, tau_negative=negative, weight=x["weight"]
        ),
        naive.sapo,
    ),
    "sapo_sequence": (
        lambda t, x, positive=1.0, negative=1.05: sapo_sequence(
            t,
            x["behaviour"],
            x["advantages"],
            x["sequence"],
            int(x["sequence"].max()) + 1,
            tau_positive=positive,
            tau_negative=negative,
            weight=x["weight"],
        ),
        naive.sapo_sequence,
    ),
    "cispo": (lambda t, x, **a: cispo(t, x["behaviour"], x["advantages"], weight=x["weight"], **a), naive.cispo),
    "reinforce": (lambda t, x: reinforce(t, x["proximal"], x["advantages"], weight=x["weight"]), naive.reinforce),
    "value": (lambda t, x, **a: value_loss(t, x["proximal"], x["behaviour"], **a), naive.value),
}
CASES = [
    ("ppo", {"clip": 0.2}),
    ("ppo", {"clip": 0.2, "clip_high": 0.28, "dual_clip": 1.5}),
    ("gspo", {"clip": 0.05}),
    ("gspo", {"clip": 0.01, "clip_high": 0.3, "dual_clip": 1.5}),
    ("sapo", {}),
    ("sapo", {"positive": 0.5, "negative": 3.0}),
    ("sapo_sequence", {"positive": 0.5, "negative": 3.0}),
    ("cispo", {"clip_high": 0.2}),
    ("reinforce", {}),
    ("value", {}),
    ("value", {"clip": None}),
    ("value", {"kind": "huber", "huber_delta": 0.3}),
]


def tokens(seed, n, spread):
    """n tokens of up to four sequences that lie mixed, some of weight 0, some of advantage 0; float64."""
    rng = np.random.default_rng(seed)
    behaviour = -rng.exponential(1.5, n)
    weight = rng.exponential(1.0, n)
    weight[rng.random(n) < 0.2] = 0.0
    advantages = rng.normal(size=n)
    advantages[rng.random(n) < 0.1] = 0.0
    proximal = behaviour + rng.normal(0, spread, n)
    sequence = np.unique(rng.integers(0, 4, n), return_inverse=True)[1]
    x = {"behaviour": behaviour, "proximal": proximal, "weight": weight, "advantages": advantages, "sequence": sequence}
    return proximal + rng.normal(0, spread, n), x


def tensors(x):
    return {name: torch.from_numpy(np.asarray(array)) for name, array in x.items()}


@pytest.mark.parametrize(("name", "arguments"), CASES)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 12), spread=st.sampled_from([0.01, 0.3, 1.5]))
def test_a_loss_is_that_of_its_twin_and_so_is_its_gradient(name, arguments, seed, n, spread):
    """Central differences know nothing of autograd, of detached tensors or of scatter."""
    theta, x = tokens(seed, n, spread)
    fast, slow = LOSSES[name]
    moving = torch.from_numpy(theta).requires_grad_()
    loss = fast(moving, tensors(x), **arguments)
    (gradient,) = torch.autograd.grad(loss.total, moving)
    assert loss.total.item() == pytest.approx(slow(theta, theta, x, **arguments), rel=1e-9, abs=1e-9)
    differences = naive.central_differences(slow, theta, x, **arguments)
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "arguments"), [case for case in CASES if case[0] != "cispo"])
def test_a_gradient_is_that_of_the_function_itself(name, arguments):
    """Central differences of our own function; CISPO means another gradient than that of its value."""
    theta, x = tokens(2, 30, 0.3)
    moving = torch.from_numpy(theta).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: LOSSES[name][0](t, tensors(x), **arguments).total, moving)


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_a_loss_in_float32_is_that_in_float64_and_so_is_its_gradient(name, arguments):
    """What trains is float32."""
    theta, x = tokens(3, 40, 0.3)
    fast, slow = LOSSES[name]
    rounded = {k: v.float() if v.is_floating_point() else v for k, v in tensors(x).items()}
    moving = torch.from_numpy(theta).float().requires_grad_()
    loss = fast(moving, rounded, **arguments)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(slow(theta, theta, x, **arguments), rel=1e-5, abs=1e-5)
    differences = naive.central_differences(slow, theta, x, **arguments)
    np.testing.assert_allclose(moving.grad, differences, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(seed=st.integers(0, 10**6), n=st.integers(1, 12))
def test_kl_estimators_have_the_gradient_of_their_twin(estimator, seed, n):
    """The penalty in the loss is differentiated through the policy."""
    theta, x = tokens(seed, n, 0.5)
    moving = torch.from_numpy(theta).requires_grad_()
    total = kl(moving, torch.from_numpy(x["behaviour"]), estimator).sum()
    (gradient,) = torch.autograd.grad(total, moving)
    assert total.item() == pytest.approx(naive.kl(theta, theta, x, estimator), rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(gradient, naive.central_differences(naive.kl, theta, x, estimator=estimator), atol=1e-6)


def test_kl_is_clamped_so_that_one_token_cannot_dominate():
    assert kl(torch.tensor([-50.0, 0.0]), torch.tensor([0.0, -50.0]), "k1").tolist() == [-10.0, 10.0]
    assert kl(torch.tensor([-50.0]), torch.tensor([0.0]), "k3").tolist() == [10.0]


@pytest.mark.parametrize("name", ["ppo", "gspo", "sapo", "sapo_sequence", "cispo", "reinforce"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_became_e_to_the_200_more_likely_gives_a_finite_gradient(name, advantage):
    """exp(200) is inf in float32, and the branch that is not taken would contribute 0·inf = NaN."""
    theta = torch.tensor([0.0, -0.5], requires_grad=True)
    old = torch.tensor([-200.0, -0.5])
    x = {"proximal": old, "behaviour": old, "advantages": torch.tensor([advantage, 1.0]), "weight": torch.ones(2)}
    arguments = {"ppo": {"clip": 0.2}, "gspo": {"clip": 0.2}, "cispo": {"clip_high": 0.2}}.get(name, {})
    LOSSES[name][0](theta, x | {"sequence": torch.tensor([0, 1])}, **arguments).total.backward()
    assert theta.grad is not None
    assert theta.grad.isfinite().all()
    assert theta.grad[1].item() == pytest.approx(-1.0)


@pytest.mark.parametrize("name", ["ppo", "sapo", "cispo", "reinforce"])
def test_a_loss_is_a_sum_so_that_micro_batches_add_up(name):
    """N is the mini-batch's; a mean per micro-batch would weight short ones more."""
    theta, x = tokens(5, 9, 0.3)
    arguments = {"ppo": {"clip": 0.2}, "cispo": {"clip_high": 0.2}}.get(name, {})

    def total(chosen):
        return LOSSES[name][0](
            torch.from_numpy(theta)[chosen], {k: v[chosen] for k, v in tensors(x).items()}, **arguments
        )

    parts = [total(chosen).total.item() for chosen in (slice(0, 3), slice(3, 9))]
    assert sum(parts) == pytest.approx(total(slice(None)).total.item())


def test_on_policy_all_losses_point_the_same_way():
    """At ratio 1 each of them is the policy gradient: −A, divided by nothing."""
    theta = torch.tensor([-0.5, -1.0, -2.0])
    x = {"proximal": theta, "behaviour": theta, "advantages": torch.tensor([1.0, -0.5, 2.0]), "weight": torch.ones(3)}
    x["sequence"] = torch.arange(3)
    for name, arguments in (("ppo", {"clip": 0.2}), ("gspo", {"clip": 0.2}), ("sapo", {}), ("sapo_sequence", {}),
                            ("cispo", {"clip_high": 0.2}), ("reinforce", {})):  # fmt: skip
        moving = theta.clone().requires_grad_()
        LOSSES[name][0](moving, x, **arguments).total.backward()
        assert moving.grad.tolist() == pytest.approx([-1.0, 0.5, -2.0]), name


# ---- masks


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 30),
    threshold=st.sampled_from([1e-6, 0.01, 0.04, 0.5, 100.0]),
    spread=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_m2po_masks_as_one_by_one_the_furthest_token_off(seed, n, threshold, spread):
    _, x = tokens(seed, n, spread)
    keep = second_moment_mask(torch.from_numpy(x["proximal"]), torch.from_numpy(x["behaviour"]), threshold)
    assert keep.tolist() == naive.second_moment_mask(x["proximal"], x["behaviour"], threshold).tolist()


def test_m2po_masks_what_the_engine_told_no_number_for():
    behaviour = torch.tensor([-1.0, math.nan, -math.inf])
    assert second_moment_mask(torch.full((3,), -1.0), behaviour, 0.04).tolist() == [True, False, False]


@given(seed=st.integers(0, 10**6), n=st.integers(1, 20), threshold=st.sampled_from([1e-4, 0.1]))
def test_opsm_drops_the_bad_sequences_that_the_policy_has_left(seed, n, threshold):
    _, x = tokens(seed, n, 0.3)
    t = tensors(x)
    ours = off_policy_sequences(t["proximal"], t["behaviour"], t["advantages"], t["sequence"], 4, threshold)
    assert ours.tolist() == naive.off_policy_sequences(x, threshold).tolist()


# ---- estimates


@given(seed=st.integers(0, 10**6), n=st.integers(1, 12), how=st.sampled_from(["loglinear", "linear", "rollout"]))
def test_an_approximate_proximal_policy_is_that_of_its_twin(seed, n, how):
    """Token by token: of versions before, of the one that is made, of none."""
    theta, x = tokens(seed, n, 0.5)
    versions = np.random.default_rng(seed).integers(-1, 10, n)
    ours = approximate(how, torch.from_numpy(x["behaviour"]), torch.from_numpy(theta), torch.from_numpy(versions), 8)
    np.testing.assert_allclose(ours, naive.approximate(how, x["behaviour"], theta, versions, 8), rtol=1e-9)


@given(
    seed=st.integers(0, 10**6),
    length=st.integers(1, 10),
    discount=st.sampled_from([1.0, 0.9]),
    gae_lambda=st.sampled_from([1.0, 0.8, 0.0]),
)
def test_gae_is_the_sum_over_what_follows_with_masked_tokens_left_out(seed, length, discount, gae_lambda):
    """The recursion is the fast form."""
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, 3, length))
    mask, last = rng.random((3, length)) < 0.7, rng.normal(size=3)
    advantages, returns = gae(rewards, values, mask, last, discount=discount, gae_lambda=gae_lambda)
    for i in range(3):
        expected = naive.gae(rewards[i], values[i], mask[i], last[i], discount, gae_lambda)
        np.testing.assert_allclose(advantages[i], expected, atol=1e-12)
    np.testing.assert_allclose(returns, advantages + values)


def test_a_token_of_the_proximal_version_needs_no_approximation():
    """It was sampled by that very policy; one of the version before lies half-way, none goes further than θ."""
    behaviour, theta = torch.full((4,), -2.0), torch.full((4,), -1.0)
    versions = torch.tensor([7, 6, 0, -1])
    ours = approximate("loglinear", behaviour, theta, versions, current_version=8)
    assert ours.tolist() == pytest.approx([-2.0, -1.5, -2.0 + 7 / 8, -2.0])
    assert not approximate("linear", behaviour, theta.requires_grad_(), versions, 8).requires_grad
