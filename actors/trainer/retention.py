"""Which checkpoints stay: the newest, every n-th for ever, the best by evaluation. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """What evaluations say so far: mean rewards by version, and the versions that are being evaluated now."""

    scores: Mapping[int, float] = dataclasses.field(default_factory=dict)
    at_work: frozenset[int] = frozenset()


NOTHING_JUDGED = Judged()


@dataclasses.dataclass(frozen=True, slots=True)
class Retention:
    """The newest `last` stay (at least one), and for ever those whose version is a multiple of `every` (0: none).

    So does the best of those that were evaluated, and what is being evaluated, since it may become the best.
    """

    last: int
    every: int = 0

    def kept(self, versions: Iterable[int], judged: Judged = NOTHING_JUDGED) -> set[int]:
        """Those of `versions` that stay."""
        newest_first = sorted(set(versions), reverse=True)
        kept = set(newest_first[: max(self.last, 1)])
        if self.every:
            kept |= {version for version in newest_first if version and version % self.every == 0}
        best = best_of(newest_first, judged)
        if best is not None:
            kept.add(best)
        return kept | judged.at_work.intersection(newest_first)


NEWEST = Retention(last=1)


def best_of(versions: Iterable[int], judged: Judged) -> int | None:
    """The one with the highest score, the earliest of equal ones; None if none was evaluated."""
    evaluated = [version for version in versions if version in judged.scores]
    return min(evaluated, key=lambda version: (-judged.scores[version], version), default=None)
