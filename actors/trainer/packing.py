"""Sequences into rows, rows into micro-batches, so that little of the compute is padding. Plain Python: no tensors.

A row holds whole sequences side by side (`forward.collate` keeps them apart by a block-diagonal mask); a micro-batch
holds rows of similar width.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import structlog

log = structlog.get_logger(__name__)

PADDING_MAX = 0.05  # share of padding that is good enough; wider rows cost attention, which is quadratic


@dataclass(frozen=True, slots=True)
class Row:
    """Indices of the sequences that share a row, and the tokens that they fill together."""

    sequences: tuple[int, ...]
    tokens: int


def first_fit_decreasing(lengths: Sequence[int], capacity: int, min_bins: int = 1) -> list[list[int]]:
    """Indices of `lengths` (tokens) in bins of at most `capacity` tokens, in order of opening; ascending in each.

    Longest first: a new bin is opened while there are fewer than `min_bins`, or if the emptiest cannot take the
    sequence; otherwise it goes to the bin with the fewest sequences of those that can take it, then the emptiest.
    A sequence over the capacity is a bin of its own, with a warning. Source: AReaL's `ffd_allocate`.
    """
    bins: list[list[int]] = []
    by_load: list[tuple[int, int]] = []  # (tokens, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > capacity:
            log.warning("sequence_exceeded_the_budget", tokens=length, budget_tokens=capacity)
        if len(bins) < min_bins or by_load[0][0] + length > capacity:
            insort(by_load, (length, len(bins)))
            bins.append([index])
            continue
        fitting = [entry for entry in by_load if entry[0] + length <= capacity]
        load, chosen = min(fitting, key=lambda entry: len(bins[entry[1]]))
        by_load.remove((load, chosen))
        insort(by_load, (load + length, chosen))
        bins[chosen].append(index)
    return [sorted(members) for members in bins]


def balanced(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Indices of `lengths` in at most `bins` bins that are filled about alike, none empty; ascending in each.

    Longest first, each into the emptiest bin. Source: Graham's longest processing time first, whose fullest bin holds
    at most 4/3 of what it must.
    """
    members: list[list[int]] = [[] for _ in range(bins)]
    by_load = [(0, bin_) for bin_ in range(bins)]  # a heap: the emptiest is the first
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, emptiest = by_load[0]
        members[emptiest].append(index)
        heapreplace(by_load, (load + lengths[index], emptiest))
    return [sorted(of_bin) for of_bin in members if of_bin]


def pack(
    lengths: Sequence[int], *, micro_batch_tokens: int, row_tokens: int = 0, share_rows: bool = True
) -> list[list[Row]]:
    """Micro-batches of rows for sequences of `lengths` tokens (prompt + response); every index is in exactly one row.

    A micro-batch of R rows costs R·(its widest row) ≤ `micro_batch_tokens`, unless one sequence alone is longer.
    `row_tokens` is a row's capacity; 0 takes rows as wide as the longest sequence, and if those leave more than 5 %
    padding, the most rows, filled alike, that do not; if none do, those with the least padding.
    `share_rows` False gives every sequence its own row, for models that cannot keep neighbours apart.
    """
    if not lengths:
        return []
    if not share_rows:
        return _stack([Row((i,), length) for i, length in enumerate(lengths)], micro_batch_tokens)
    capacity = row_tokens or min(max(lengths), micro_batch_tokens)
    best = _stack(_rows(lengths, first_fit_decreasing(lengths, capacity)), micro_batch_tokens)
    if row_tokens or max(lengths) > micro_batch_tokens:
        return best
    for count in range(sum(lengths) // max(lengths), 0, -1):
        rows = _rows(lengths, balanced(lengths, count))
        if padding_fraction(best) <= PADDING_MAX or max(row.tokens for row in rows) > micro_batch_tokens:
            break
        candidate = _stack(rows, micro_batch_tokens)
        if padding_fraction(candidate) < padding_fraction(best):
            best = candidate
    return best


def padding_fraction(micro_batches: Sequence[Sequence[Row]]) -> float:
    """The share of all row positions that hold no token."""
    used = sum(row.tokens for rows in micro_batches for row in rows)
    cost = sum(len(rows) * max(row.tokens for row in rows) for rows in micro_batches)
    return 1 - used / cost if cost else 0.0


def _rows(lengths: Sequence[int], bins: Sequence[Sequence[int]]) -> list[Row]:
    return [Row(tuple(members), sum(lengths[i] for i in members)) for members in bins]


def _stack(rows: Sequence[Row], micro_batch_tokens: int) -> list[list[Row]]:
    """Widest first, so that rows of a micro-batch are of similar width."""
    micro_batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda r: -r.tokens):
        current = micro_batches[-1] if micro_batches else []
        if current and (len(current) + 1) * current[0].tokens <= micro_batch_tokens:
            current.append(row)
        else:
            micro_batches.append([row])
    return micro_batches
