"""How far two log-probabilities of the same tokens lie apart: statistics in bounded memory, and the worst tokens."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SMALLEST, DECADES, PER_DECADE = 1e-10, 13, 40  # of the histogram: 1e-10 to 1e3 nats, 6 % a bin
LARGEST: Final = 1e3  # nats; what is no number counts as this
QUANTILES: Final = (0.5, 0.9, 0.99, 0.999)
POSITIONS: Final = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384)  # where bins of positions begin


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Offender:
    """A token on which both differ: at `position` of its answer, with the log-probabilities in nats.

    `before` and `after` are the token ids around it, at most `CONTEXT` each.
    """

    difference: float  # |trainer - engine|
    sample_id: str
    position: int
    version: int
    engine: float
    trainer: float
    token: int
    before: tuple[int, ...]
    after: tuple[int, ...]


CONTEXT: Final = 8


@dataclasses.dataclass(slots=True)
class Differences:
    """Of n tokens: |Δ| with Δ = trainer − engine, in nats, and k3 of KL(engine ‖ trainer), mean of exp(Δ) − 1 − Δ."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0
    k3_total: float = 0.0
    above: int = 0  # tokens whose |Δ| exceeds the tolerance

    def add(self, delta: Floats, tolerance: float) -> None:
        """Take the Δ [n] of more tokens."""
        if not len(delta):
            return
        size = np.abs(delta)
        self.tokens += len(delta)
        self.total += float(size.sum())
        self.largest = max(self.largest, float(size.max()))
        self.k3_total += float((np.expm1(np.clip(delta, -30, 30)) - delta).sum())
        self.above += int((size > tolerance).sum())

    @property
    def mean(self) -> float:
        """Of |Δ|."""
        return self.total / max(self.tokens, 1)

    @property
    def k3(self) -> float:
        """KL(engine ‖ trainer) per token."""
        return self.k3_total / max(self.tokens, 1)

    @property
    def share_above(self) -> float:
        """Share of tokens whose |Δ| exceeds the tolerance."""
        return self.above / max(self.tokens, 1)

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {
            "tokens": self.tokens,
            "mean": self.mean,
            "max": self.largest,
            "k3": self.k3,
            "above_tolerance": self.share_above,
        }


class Mismatch:
    """Takes samples one by one; keeps totals by version and by position, a histogram, and the `worst` tokens."""

    def __init__(self, tolerance: float, worst: int) -> None:
        self.tolerance = tolerance
        self.all = Differences()
        self.by_version: dict[int, Differences] = {}
        self.by_position: dict[int, Differences] = {}  # by the bin's first position
        self.samples: set[str] = set()
        self._worst = worst
        self._offenders: list[Offender] = []  # a heap, the smallest first
        self._histogram = np.zeros(DECADES * PER_DECADE + 2, np.int64)

    def add(
        self,
        sample_id: str,
        version: int,
        tokens: npt.NDArray[Any],
        positions: npt.NDArray[Any],
        engine: npt.NDArray[Any],
        trainer: npt.NDArray[Any],
    ) -> None:
        """Tokens of one version in one sample: `tokens` are the whole answer's ids [T], the others are of the n tokens.

        `positions` [n] are those in the answer, `engine` and `trainer` [n] log-probabilities.
        """
        delta = trainer.astype(np.float64) - engine.astype(np.float64)
        delta = np.clip(np.nan_to_num(delta, nan=LARGEST), -LARGEST, LARGEST)
        self.samples.add(sample_id)
        self.all.add(delta, self.tolerance)
        self.by_version.setdefault(version, Differences()).add(delta, self.tolerance)
        bins = np.searchsorted(POSITIONS, positions, side="right") - 1
        for at in np.unique(bins).tolist():
            self.by_position.setdefault(POSITIONS[at], Differences()).add(delta[bins == at], self.tolerance)
        size = np.abs(delta)
        self._histogram += np.bincount(_bin_of(size), minlength=len(self._histogram))
        floor = self._offenders[0].difference if self._offenders and len(self._offenders) == self._worst else 0.0
        for i in np.flatnonzero(size > floor).tolist():
            at = int(positions[i])
            offender = Offender(
                float(size[i]),
                sample_id,
                at,
                version,
                float(engine[i]),
                float(trainer[i]),
                int(tokens[at]),
                tuple(tokens[max(0, at - CONTEXT) : at].tolist()),
                tuple(tokens[at + 1 : at + 1 + CONTEXT].tolist()),
            )
            if len(self._offenders) < self._worst:
                heapq.heappush(self._offenders, offender)
            elif self._worst > 0:
                heapq.heappushpop(self._offenders, offender)

    @property
    def offenders(self) -> list[Offender]:
        """The worst tokens, the worst first."""
        return sorted(self._offenders, reverse=True)

    def quantiles(self, shares: Sequence[float] = QUANTILES) -> dict[float, float]:
        """|Δ| below which a share of the tokens lies, to the 6 % of a bin."""
        below = np.cumsum(self._histogram)
        out = {}
        for share in shares:
            at = int(np.searchsorted(below, share * self.all.tokens))
            out[share] = 0.0 if at == 0 else min(SMALLEST * 10 ** (at / PER_DECADE), self.all.largest)
        return out


def _bin_of(size: Floats) -> npt.NDArray[np.int64]:
    """0 below `SMALLEST`, then one bin every 1/40 of a decade."""
    with np.errstate(divide="ignore"):
        places = np.ceil(PER_DECADE * np.log10(size / SMALLEST))
    bins: npt.NDArray[np.int64] = np.clip(places, 0, DECADES * PER_DECADE + 1).astype(np.int64)
    return bins
