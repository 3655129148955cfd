"""How a sample is named, in messages and in their headers, and what versions its tokens are of."""

from __future__ import annotations

from schemas.fields import Segments

GROUP_ID_MAX = 1 << 62
INDEX_MAX = 1 << 20
DIGITS_MAX = 20


def sample_id(group_id: int, index: int) -> str:
    """`sample_id(12, 3) == "12-3"`."""
    return f"{group_id}-{index}"


def parse_sample_id(value: str) -> tuple[int, int] | None:
    """`(group_id, index)` of a sample id, None if it is none. For reading headers of messages that do not decode."""
    pair = parse_pair(value)
    return pair if pair is not None and pair[0] <= GROUP_ID_MAX and pair[1] <= INDEX_MAX else None


def parse_pair(value: str) -> tuple[int, int] | None:
    """The numbers in `"12-3"`, None if it is not of that form: headers come from elsewhere and may hold any text."""
    first, _, second = value.partition("-")
    if len(value) > 2 * DIGITS_MAX or not (first.isdecimal() and second.isdecimal()):
        return None
    return int(first), int(second)


def oldest_and_newest(pairs: Segments) -> tuple[int, int] | None:
    """The oldest and newest policy version in run-length coded segments, None if there is no token."""
    if not pairs:
        return None
    return min(version for version, _ in pairs), max(version for version, _ in pairs)
