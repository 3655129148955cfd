import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.trainer.config import CorrectionConfig
from actors.trainer.corrections import behaviour_weight, log_ratio

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


@given(
    st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=12),
    st.sampled_from(["ratio", "k1", "k2", "k3"]),
    st.sampled_from(["sum", "mean", "max"]),
)
def test_sequence_masks_agree_with_a_loop_over_sequences(values, metric, aggregate):
    """The flat scatter is the fast form; the loop is what it means."""
    r = torch.tensor(values, dtype=torch.float32)
    sequence = torch.arange(len(r)) // 3
    config = CorrectionConfig(level="sequence", metric=metric, aggregate=aggregate, lower=0.3, upper=1.7)
    fast = behaviour_weight(r, torch.zeros_like(r), sequence, int(sequence[-1]) + 1, config)
    per_token = {"ratio": r, "k1": r, "k2": r**2 / 2, "k3": (-r).exp() - 1 + r}[metric]
    for s in sequence.unique():
        m = per_token[sequence == s]
        value = {"sum": m.sum(), "mean": m.mean(), "max": m.max()}[aggregate]
        value = value.exp() if metric == "ratio" else value
        if min(abs(value - 0.3), abs(value - 1.7)) > 1e-4:  # on the bound rounding decides
            assert fast.changed[sequence == s].tolist() == [not 0.3 <= value <= 1.7] * len(m)


@pytest.mark.parametrize(
    ("config", "says"),
    [({"metric": "k3", "action": "clamp"}, "use metric 'ratio'"), ({"lower": 6.0}, "not below upper")],
)
def test_corrections_that_make_no_sense_are_refused_with_the_remedy(config, says):
    with pytest.raises(ValidationError, match=says):
        CorrectionConfig(**config)
