"""Rewards become advantages by group or batch: what no golden shows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.advantages import normalise, shape_rewards, zero_variance

REWARDS = [1.0, 0, 0, 1, 1, 1, 1, 0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]


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


def test_a_batch_of_equal_rewards_has_no_advantage_under_a_batch_mean_either():
    """The mean of three 0.3 is not 0.3; divided by eps that would be a gradient, which Adam makes a whole step."""
    np.testing.assert_array_equal(normalise([0.3, 0.1 + 0.2, 0.3], [0, 1, 2], mean="batch", std="batch"), 0.0)


def test_an_empty_batch_gives_no_advantages():
    """A step whose samples were all dropped still runs through."""
    assert normalise([], []).shape == (0,)
