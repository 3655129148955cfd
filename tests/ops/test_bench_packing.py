"""Numbers that are quoted must be those of the batches that the trainer packs, and of the same loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.trainer.config import TrainerConfig
from actors.trainer.learner import Learner
from ops import bench_packing
from ops.bench_packing import difference, report, tail
from ops.bench_packing_run import WAYS, Batches, Pass, Step, minibatches, one_pass, one_step, positions, rows_of
from ops.recipe import load_recipe
from tests.actors.tiny_models import qwen3, samples

RECIPE = Path(bench_packing.__file__).parent.parent / "recipes" / "running_total.yaml"
LENGTHS = [9, 30, 4, 4, 17, 6, 12]


def test_positions_are_counted_as_each_way_lays_them_out() -> None:
    """Hand-computed: padded, all rows are 30 wide; sorted, 30 and 17 share a micro-batch, then 12, 9, 6, 4 and 4."""
    assert positions(LENGTHS, "padded", 60) == 7 * 30
    assert positions(LENGTHS, "sorted", 60) == 2 * 30 + 5 * 12
    assert sum(LENGTHS) <= positions(LENGTHS, "packed", 60) < 90
    for way in WAYS:
        placed = [i for rows in rows_of(LENGTHS, way, 60) for row in rows for i in row.sequences]
        assert sorted(placed) == list(range(7))


def test_the_mini_batches_are_those_that_the_learner_packs() -> None:
    """A copy of the split would otherwise measure other batches than those that are trained."""
    recipe = load_recipe(RECIPE, ("trainer.minibatches=3", "seed=5"))
    made = samples(groups=6, size=4, seed=1)
    learner = Learner(qwen3(num_hidden_layers=1), TrainerConfig(minibatches=3, seed=5, lr=1e-3))
    metrics = learner.step(2, made)
    lengths = minibatches(made, 2, recipe)
    used = sum(map(sum, lengths))
    assert used == metrics["tokens_packed"]
    padding = 1 - used / sum(positions(of_one, "packed", recipe.trainer.micro_batch_tokens) for of_one in lengths)
    assert padding == pytest.approx(metrics["padding_fraction"])


def test_all_ways_have_the_same_loss_and_the_same_gradient() -> None:
    """Else their times could not be compared."""
    ways = {way: one_pass(LENGTHS * 3, way, 120, None) for way in WAYS}
    assert difference(ways) < 1e-6


def test_a_step_takes_the_memory_of_one_micro_batch() -> None:
    """Eight times the micro-batches, less than a twentieth more, and that in proportion to the tokens themselves."""
    few, many = one_step(2, 32, 4), one_step(16, 32, 4)
    assert few.micro_batches < many.micro_batches
    assert few.tensors < many.tensors < 1.05 * few.tensors
    assert (many.tensors - few.tensors) / (2 * 14 * 32 * 4) < 100, "bytes a token"


def test_the_page_tells_the_ratios() -> None:
    """Hand-computed."""
    mebibyte = 1 << 20
    ways = {
        "packed": Pass(1.0, 10 * mebibyte, 11 * mebibyte, 2.0, [1.0]),
        "sorted": Pass(2.0, 20 * mebibyte, 21 * mebibyte, 2.0, [1.0]),
        "padded": Pass(3.5, 40 * mebibyte, 41 * mebibyte, 2.0, [1.0]),
    }
    grown = [Step(2, 10 * mebibyte, 0), Step(32, 11 * mebibyte, 0)]
    recipe = load_recipe(RECIPE, ("trainer.micro_batch_tokens=60",))
    real = Batches([LENGTHS], [0.02, 0.04, 0.03], [0.1, 0.2, 0.3])
    page = report(recipe, real, {"running-total": (LENGTHS, ways)}, grown, "a machine")
    assert "| running-total | padded | 210 | 3.500 | 3.50 | 40.0 | 41.0 |" in page
    assert "61.0% (61.0%)" in page
    assert "mean 3.0%, at most 4.0%" in page
    assert "16 times the tokens take 1.100 times the memory" in page


def test_the_harsher_tail_is_long() -> None:
    lengths = np.array(tail(64))
    assert lengths.max() > 4 * lengths.mean()
    assert lengths.max() <= 2000
