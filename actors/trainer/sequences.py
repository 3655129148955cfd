"""Sums, means and maxima over the tokens of each sequence, in a flat micro-batch that holds many."""

from typing import Literal

import torch
from torch import Tensor

Aggregate = Literal["sum", "mean", "max"]


def per_sequence(values: Tensor, sequence: Tensor, sequences: int, how: Aggregate) -> Tensor:
    """Aggregate [S] of `values` [n] over the tokens of each sequence; differentiable.

    `sequence` int64 [n] in [0, `sequences`) tells whose token each is. A sequence without tokens has sum 0, mean 0 and
    max −inf. A sequence must lie whole in the micro-batch, which packing sees to.
    """
    if how == "max":
        lowest = values.new_full((sequences,), -torch.inf)
        return lowest.scatter_reduce(0, sequence, values, reduce="amax")
    total = values.new_zeros(sequences).index_add(0, sequence, values)
    if how == "sum":
        return total
    return total / torch.bincount(sequence, minlength=sequences).clamp(min=1)
