from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from actors.trainer.packing import balanced, first_fit_decreasing, pack, padding_fraction
from recipes.running_total import demonstration

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


@given(LENGTHS, st.integers(1, 12))
def test_balanced_bins_hold_every_sequence_once_and_are_about_alike(lengths, count):
    """No bin could be given away: each holds no more than the others do on average, and one sequence."""
    bins = balanced(lengths, count)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert len(bins) == min(count, len(lengths))
    loads = [sum(lengths[i] for i in members) for members in bins]
    assert max(loads) <= sum(lengths) / count + max(lengths)
    assert max(loads) <= min(loads) + max(lengths)


def recipe_lengths(random, groups, size, progress):
    """Prompt and answer of each sample, an end token behind it, as the default recipe's policy gives them."""
    lengths = []
    for _ in range(groups):
        prompt, answer = demonstration(random, progress)
        short = len(["#", "12"]) + 1
        whole = len(answer.split()) + 1
        lengths += [len(prompt.split()) + random.choice((short, whole)) for _ in range(size)]
    return lengths


@pytest.mark.parametrize("samples", [8, 16, 32, 64])
@pytest.mark.parametrize("progress", [0.5, 1.0])
def test_padding_stays_under_five_percent_on_the_recipes_lengths(samples, progress):
    """Mini-batches of few samples too: late in a run most groups teach nothing and are left out."""
    for seed in range(50):
        lengths = recipe_lengths(Random(seed), samples // 8, 8, progress)
        micro_batches = pack(lengths, micro_batch_tokens=8192)
        assert padding_fraction(micro_batches) <= 0.05, (seed, lengths)
        if samples == 64:  # of few samples it may take a row of all to waste so little
            widest = max(row.tokens for rows in micro_batches for row in rows)
            assert widest <= 4 * max(lengths), "attention grows with the square of a row"


@pytest.mark.parametrize("seed", range(8))
def test_padding_stays_under_five_percent_on_a_harsher_tail(seed):
    """Padded batches waste four fifths of the compute on such lengths."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(150), 1.2, 64), 8, 2000).astype(int).tolist()
    assert padding_fraction(pack(lengths, micro_batch_tokens=8192)) <= 0.05
    assert 1 - sum(lengths) / (64 * max(lengths)) > 0.7


def test_a_fixed_row_length_is_kept():
    micro_batches = pack([10] * 7, micro_batch_tokens=60, row_tokens=30)
    assert [[row.tokens for row in rows] for rows in micro_batches] == [[30, 30], [10]]


def test_nothing_packs_into_nothing():
    assert pack([], micro_batch_tokens=100) == []
    assert padding_fraction([]) == 0.0
