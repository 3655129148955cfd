"""Sequences into rows, rows into micro-batches, so that little of the compute is padding. Plain Python: no tensors.

A row holds whole sequences side by side (`forward.collate` keeps them apart by a block-diagonal mask); a micro-batch
holds rows of similar width.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)

PADDING_MAX = 0.05  # share of padding that is good enough; wider rows cost attention, which is quadratic
WIDENINGS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)  # × the longest sequence: row capacities tried


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


def pack(
    lengths: Sequence[int], *, micro_batch_tokens: int, row_tokens: int = 0, share_rows: bool = True
) -> list[list[Row]]:
    """Micro-batches of rows for sequences of `lengths` tokens (prompt + response); every index is in exactly one row.

    A micro-batch of R rows costs R·(its widest row) ≤ `micro_batch_tokens`, unless one sequence alone is longer.
    `row_tokens` is a row's capacity; 0 takes the narrowest that leaves at most 5 % padding, else the least padding.
    `share_rows` False gives every sequence its own row, for models that cannot keep neighbours apart.
    """
    if not lengths:
        return []
    if not share_rows:
        return _stack([Row((i,), length) for i, length in enumerate(lengths)], micro_batch_tokens)
    if row_tokens:
        return _stack(_rows(lengths, row_tokens), micro_batch_tokens)

    best: list[list[Row]] = []
    capacities = dict.fromkeys(min(int(max(lengths) * w), micro_batch_tokens) for w in WIDENINGS)
    for capacity in capacities:
        candidate = _stack(_rows(lengths, capacity), micro_batch_tokens)
        if not best or padding_fraction(candidate) < padding_fraction(best):
            best = candidate
        if padding_fraction(best) <= PADDING_MAX:
            break
    return best


def padding_fraction(micro_batches: Sequence[Sequence[Row]]) -> float:
    """The share of all row positions that hold no token."""
    used = sum(row.tokens for rows in micro_batches for row in rows)
    cost = sum(len(rows) * max(row.tokens for row in rows) for rows in micro_batches)
    return 1 - used / cost if cost else 0.0


def _rows(lengths: Sequence[int], capacity: int) -> list[Row]:
    bins = first_fit_decreasing(lengths, capacity)
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
