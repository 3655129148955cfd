import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.advantages import normalise, shape_rewards, zero_variance

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "areal.json").read_text())
REWARDS = [1.0, 0, 0, 1, 1, 1, 1, 0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
PRESETS = {
    "norm_group_mean_group_std_G4": {},
    "norm_group_mean_group_std_biased_G4": {"unbiased": False},
    "norm_group_mean_no_std_G4(DrGRPO)": {"std": "none"},
    "norm_group_loo_no_std_G4(RLOO)": {"std": "none", "leave_one_out": True},
    "norm_group_mean_batch_std_G4(LitePPO)": {"std": "batch"},
    "norm_batch_batch": {"mean": "batch", "std": "batch"},
}


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_gives_the_numbers_of_the_reference(name):
    """The presets are the published algorithms; a different denominator would be a different algorithm."""
    np.testing.assert_allclose(normalise(REWARDS, GROUPS, **PRESETS[name]), GOLDEN[name], atol=1e-5)


def test_token_values_are_normalised_over_the_batch_or_by_group():
    """Advantages of tokens, masked ones left out, use the same function."""
    batch = GOLDEN["norm_token_batch_masked"]
    kept = [i for i in range(8) if i not in (3, 4)]  # the reference leaves its masked tokens at 0
    tokens = [0, 0, 0, 1, 1, 1]
    np.testing.assert_allclose(
        normalise(tokens, [0] * 6, mean="batch", std="batch"), [batch[i] for i in kept], atol=1e-5
    )
    by_group = GOLDEN["norm_token_group_masked_G1"]
    np.testing.assert_allclose(normalise(tokens, [0, 0, 0, 1, 1, 1]), [by_group[i] for i in kept], atol=1e-5)


def test_an_incomplete_last_group_is_a_group_not_a_division_by_eps():
    """The reference cuts groups by position and blows the tail up to 1e5; ours goes by id."""
    wrong = GOLDEN["norm_group_remainder_bs7_G4(BUG: tail /eps)"]
    right = normalise(REWARDS[:7], GROUPS[:7])
    np.testing.assert_allclose(right[:4], wrong[:4], atol=1e-5)
    assert max(wrong) == 100000.0
    np.testing.assert_array_equal(right[4:], 0.0)


@given(st.permutations(range(8)))
def test_groups_are_told_by_id_not_by_position(order):
    """Samples finish in any order."""
    shuffled = normalise([REWARDS[i] for i in order], [GROUPS[i] for i in order])
    np.testing.assert_allclose(shuffled, normalise(REWARDS, GROUPS)[list(order)], atol=1e-12)


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_a_group_of_one_has_no_advantage(std, leave_one_out):
    """It has nothing to be compared with, whatever its reward."""
    assert normalise([1.0, 0.0, 7.0], [0, 0, 9], std=std, leave_one_out=leave_one_out)[2] == 0.0


def test_equal_rewards_that_are_no_binary_fractions_give_exactly_zero():
    """0.1 + 0.2 ≠ 0.3 would otherwise become an advantage of about 1 after division by a tiny std."""
    rewards = [0.1 + 0.2, 0.3, 0.3, 0.0]
    np.testing.assert_array_equal(normalise(rewards, [0, 0, 0, 1]), 0.0)
    np.testing.assert_array_equal(zero_variance(rewards, [0, 0, 0, 1]), True)
    np.testing.assert_array_equal(zero_variance([0.0, 1e-3], [0, 0]), False)


def test_equal_groups_still_count_against_a_batch_mean():
    """With a batch baseline, a group that always succeeds is better than the batch."""
    result = normalise([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], mean="batch", std="none")
    np.testing.assert_allclose(result, [0.5, 0.5, -0.5, -0.5])


def test_rewards_are_shifted_scaled_and_clipped_in_that_order():
    """The reference's order: (1 − 0.5)·10 = 5, and the clip is of the result."""
    np.testing.assert_allclose(shape_rewards([1.0, 0.0], bias=-0.5, scale=10, clip=20), [5.0, -5.0])
    np.testing.assert_allclose(shape_rewards([3.0, -3.0], bias=0, scale=2, clip=5), [5.0, -5.0])
    np.testing.assert_allclose(shape_rewards([3.0], bias=0, scale=2, clip=None), [6.0])


def test_an_empty_batch_gives_no_advantages():
    """A step whose samples were all dropped still runs through."""
    assert normalise([], []).shape == (0,)
