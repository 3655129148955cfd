"""Whether memory grows: resident bytes of each process over time, and a robust slope through them.

A process that lives through the soak is judged by its own samples. Workers come and go, so a worker is one sample: the
median over its life but the first 5 s. The first half is warm-up: caches fill, windows of de-duplication too.
The slope is that of Theil and Sen, the median over all pairs of samples, which a few spikes do not move. Memory grows
if the slope, over the time that is judged, comes to more than 5 % of what the process holds and to more than 8 MiB.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

WARM_UP = 1 / 2
SETTLED_S = 5.0
GROWTH_SHARE = 0.05
GROWTH_BYTES = 8 << 20
POINTS_MAX = 200  # pairs grow with the square


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Resident bytes of a process at `at_s` seconds of the soak."""

    at_s: float
    name: str
    pid: int
    rss: int


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """A process, or all lives of the workers: bytes in the median, and by how much it grew in `over_s` seconds."""

    name: str
    lives: int
    median: int
    over_s: float
    grown: float

    @property
    def grows(self) -> bool:
        """Whether that is more than noise."""
        return self.grown > max(GROWTH_BYTES, GROWTH_SHARE * self.median)


def growths(samples: Sequence[Sample], seconds: float) -> list[Growth]:
    """By process, workers together, over what follows the warm-up of a soak of so many `seconds`."""
    begin_s = seconds * WARM_UP
    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        lives.setdefault((sample.name, sample.pid), []).append(sample)
    found = []
    workers = []
    for (name, _), of_life in sorted(lives.items()):
        settled = [(s.at_s, s.rss) for s in of_life if s.at_s >= of_life[0].at_s + SETTLED_S and s.at_s >= begin_s]
        if name.startswith("rollout"):
            if settled:
                middle = settled[len(settled) // 2][0]
                workers.append((middle, int(statistics.median(rss for _, rss in settled))))
        elif settled and settled[-1][0] - settled[0][0] >= (seconds - begin_s) / 2:
            found.append(_growth(name, 1, settled))
    if len(workers) > 1:
        found.append(_growth("rollout workers", len(workers), sorted(workers)))
    return found


def _growth(name: str, lives: int, points: Sequence[tuple[float, int]]) -> Growth:
    over_s = points[-1][0] - points[0][0]
    return Growth(name, lives, int(statistics.median(rss for _, rss in points)), over_s, slope(points) * over_s)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope over all pairs of points `(x, y)`; 0 if there is no pair."""
    thin = points[:: max(1, -(-len(points) // POINTS_MAX))]
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(thin, 2) if x2 > x1]
    return statistics.median(slopes) if slopes else 0.0
