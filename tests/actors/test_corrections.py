"""A weight that is out of bounds without being masked ruins a step; one that is masked for nothing wastes it."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from actors.trainer.config import CorrectionConfig
from actors.trainer.corrections import behaviour_weight, log_ratio
from tests.actors import naive_losses as naive

LOG_RATIOS = torch.tensor([0.0, math.log(2), math.log(8), math.log(0.25)])
SEQUENCE = torch.tensor([0, 0, 1, 1])


def weights(**config):
    corrected = behaviour_weight(LOG_RATIOS, torch.zeros(4), SEQUENCE, 2, CorrectionConfig(**config))
    return corrected.weight.tolist(), corrected.changed.tolist()


def test_the_default_masks_tokens_that_became_five_times_likelier():
    """The paper's cap: such a token's weight would be noise, so it teaches nothing."""
    assert weights() == (pytest.approx([1, 2, 0, 0.25]), [False, False, True, False])


def test_icepop_masks_on_both_sides():
    assert weights(lower=0.5, upper=5) == (pytest.approx([1, 2, 0, 0]), [False, False, True, True])


def test_tis_truncates_and_keeps_learning_from_the_token():
    assert weights(action="clamp", upper=5) == (pytest.approx([1, 2, 5, 0.25]), [False, False, True, False])


def test_a_sequence_weighs_its_geometric_mean():
    """√2 for both sequences: an arithmetic mean would say 4.1 for the second."""
    assert weights(level="sequence", upper=1.5)[0] == pytest.approx([2**0.5] * 4)
    assert weights(level="sequence", upper=1.4) == ([0.0] * 4, [True] * 4)


def test_without_bounds_the_raw_weight_is_used():
    for action in ("mask", "clamp"):
        assert weights(action=action, upper=None) == (pytest.approx([1, 2, 8, 0.25]), [False] * 4)


def test_a_logprob_that_is_not_finite_weighs_one():
    """Engines report −inf for tokens outside top-p, and NaN on overflow; neither may poison a step."""
    broken = torch.tensor([-math.inf, math.nan, math.inf, -1.0])
    assert log_ratio(torch.full((4,), -1.0), broken).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_no_gradient_flows_through_the_weight():
    """A differentiable weight would turn the objective into another one."""
    proximal = LOG_RATIOS.clone().requires_grad_()
    assert not behaviour_weight(proximal, torch.zeros(4), SEQUENCE, 2, CorrectionConfig()).weight.requires_grad


BOUNDS = [(None, 1.7), (0.3, None), (0.3, 1.7), (None, None)]
EVERY = [
    CorrectionConfig(level=level, metric=metric, aggregate=aggregate, action=action, lower=lower, upper=upper)
    for level in ("token", "sequence")
    for metric in ("ratio", "k1", "k2", "k3")
    for aggregate in (("sum", "mean", "max") if level == "sequence" else ("mean",))
    for action in (("mask", "clamp") if metric == "ratio" else ("mask",))
    for lower, upper in BOUNDS
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", EVERY, ids=str)
def test_weights_and_masks_are_those_of_a_float64_loop(config, seed):
    """The flat scatter is the fast form; the loop is what it means."""
    rng = np.random.default_rng(seed)
    behaviour = -rng.exponential(1.5, 14)
    proximal = behaviour + rng.normal(0, 0.7, 14)
    sequence = rng.permutation(np.arange(14) // 4)
    given = (torch.from_numpy(array) for array in (proximal, behaviour, sequence))
    ours = behaviour_weight(*given, 4, config)
    weight, changed = naive.behaviour_weight(proximal, behaviour, sequence, config)
    np.testing.assert_allclose(ours.weight, weight, rtol=1e-5)
    assert ours.changed.tolist() == changed.tolist()


@pytest.mark.parametrize(
    ("config", "says"),
    [({"metric": "k3", "action": "clamp"}, "use metric 'ratio'"), ({"lower": 6.0}, "not below upper")],
)
def test_corrections_that_make_no_sense_are_refused_with_the_remedy(config, says):
    with pytest.raises(ValidationError, match=says):
        CorrectionConfig(**config)
