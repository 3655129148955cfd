"""The ranks of one trainer: what they ask of each other, and which samples each of them fetches. No torch here.

Every rank has all weights' gradients summed over the ranks, so that all take the same optimizer step. What a rank must
know of samples that it does not train itself (their rewards, groups, masks) goes from rank to rank once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from schemas import Batch

if TYPE_CHECKING:
    from torch import Tensor


class Ranks(Protocol):
    """This rank among all of them. Every method is collective: all ranks call it, in the same order."""

    rank: int
    count: int

    def gather(self, own: bytes) -> list[bytes]:
        """What every rank gave, by rank."""

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over the ranks in the place of each tensor."""


class OneRank:
    """A trainer of one process: nobody to ask."""

    rank = 0
    count = 1

    def gather(self, own: bytes) -> list[bytes]:
        """Its own."""
        return [own]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """The sum over one rank is what is there."""


def split(lengths: npt.ArrayLike, ranks: int) -> npt.NDArray[np.int64]:
    """The rank of each sample, int64 [B], so that all have about as many tokens; `lengths` int [B] are tokens.

    Longest first, each to the rank with the fewest tokens so far, of equal ones that with the fewest samples, then the
    lowest. So no two ranks differ by more than the longest sample. Every rank computes it alike.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    owners = np.zeros(len(tokens), dtype=np.int64)
    loads = [(0, 0, rank) for rank in range(ranks)]  # (tokens, samples, rank)
    for i in np.argsort(-tokens, kind="stable").tolist():
        load, samples, rank = min(loads)
        owners[i] = rank
        loads[rank] = (load + int(tokens[i]), samples + 1, rank)
    return owners


def share_of(batch: Batch, ranks: Ranks) -> npt.NDArray[np.int64]:
    """The places in the batch of the samples that this rank fetches, ascending.

    A batch of a log that tells no lengths is split by count.
    """
    n = len(batch.rollout_seqs)
    lengths: npt.NDArray[Any] = batch.lengths if len(batch.lengths) == n else np.ones(n, np.int64)
    return np.flatnonzero(split(lengths, ranks.count) == ranks.rank)
