"""Samples that ended without being trained, as a person is told of them: how many, why, and the newest failure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from schemas import Dropped
from schemas.messages import FAILURE_REASONS

DETAIL_CHARS_SHOWN = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """The newest sample that ended by a failure of some reason."""

    sample: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"sample {self.sample}: {self.reason}" + (f": {self.detail}" if self.detail else "")


class Drops:
    """Counts drops. What a run that is over has begun and needs no more is no loss, and is left out."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()  # of the whole run, by reason
        self.failed: Counter[str] = Counter()  # since this start, by reason, what was left out by intent excluded
        self.newest: Failure | None = None  # since this start
        self.newest_by_reason: dict[str, Failure] = {}

    def take(self, dropped: Dropped, before: bool) -> None:
        """Take a drop; `before`: of before this start of the run."""
        reason = dropped.reason
        if reason == "run_ended":
            return
        self.count[reason] += 1
        if reason not in FAILURE_REASONS:
            return
        detail = " ".join(dropped.detail.split())
        if len(detail) > DETAIL_CHARS_SHOWN:
            detail = f"{detail[:DETAIL_CHARS_SHOWN]} …"
        newest = self.newest_by_reason[reason] = Failure(dropped.sample_id, reason, detail)
        if not before:
            self.failed[reason] += 1
            self.newest = newest

    def failed_in_words(self) -> str:
        """`12 samples failed (10 error, 2 timeout); the newest, sample 3-0: error: ...`; empty if none has."""
        if self.newest is None:
            return ""
        total = self.failed.total()
        return f"{samples(total)} failed ({by_reason(self.failed)}); the newest, {self.newest}"


def samples(count: int) -> str:
    """`1 sample`, `1,200 samples`."""
    return f"{count:,} sample{'s' * (count != 1)}"


def by_reason(counts: Mapping[str, int]) -> str:
    """`10 error, 2 timeout`, the most frequent first."""
    return ", ".join(f"{count:,} {reason}" for reason, count in Counter(counts).most_common())
