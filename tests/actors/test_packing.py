import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from actors.trainer.packing import first_fit_decreasing, pack, padding_fraction

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(LENGTHS, st.integers(300, 1000), st.integers(1, 6))
def test_bins_hold_every_sequence_once_and_keep_to_the_budget(lengths, capacity, least):
    bins = first_fit_decreasing(lengths, capacity, least)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= capacity for members in bins)
    assert len(bins) >= min(least, len(lengths))


def test_a_sequence_over_the_budget_is_its_own_bin_and_is_named():
    """Dropping it would bias toward short answers; merging it would hide the cost."""
    with capture_logs() as logs:
        assert first_fit_decreasing([900, 40, 50], 100) == [[0], [1, 2]]
    assert logs == [
        {
            "event": "sequence_exceeded_the_budget",
            "log_level": "warning",
            "tokens": 900,
            "budget_tokens": 100,
        }
    ]


@given(LENGTHS, st.integers(300, 2000), st.booleans())
def test_micro_batches_hold_every_sequence_once_within_their_tokens(lengths, budget, share_rows):
    micro_batches = pack(lengths, micro_batch_tokens=budget, share_rows=share_rows)
    placed = [i for rows in micro_batches for row in rows for i in row.sequences]
    assert sorted(placed) == list(range(len(lengths)))
    for rows in micro_batches:
        assert len(rows) * max(row.tokens for row in rows) <= budget
        assert all(row.tokens == sum(lengths[i] for i in row.sequences) for row in rows)
        assert share_rows or all(len(row.sequences) == 1 for row in rows)


@pytest.mark.parametrize("seed", range(8))
def test_padding_stays_under_five_percent_on_long_tailed_lengths(seed):
    """Padded batches waste two thirds of the compute on such lengths."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(8 + rng.geometric(0.06, size=128), 122).tolist()
    micro_batches = pack(lengths, micro_batch_tokens=8192)
    assert padding_fraction(micro_batches) <= 0.05
    assert 1 - sum(lengths) / (128 * max(lengths)) > 0.5


def test_a_fixed_row_length_is_kept():
    micro_batches = pack([10] * 7, micro_batch_tokens=60, row_tokens=30)
    assert [[row.tokens for row in rows] for rows in micro_batches] == [[30, 30], [10]]


def test_nothing_packs_into_nothing():
    assert pack([], micro_batch_tokens=100) == []
    assert padding_fraction([]) == 0.0
