"""Which process is hit, when, and how: drawn from a seed, so that a hunt can be repeated as far as processes allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal[
    "nats", "controller", "rollout", "reward", "reward-child", "trainer", "fork-server", "launcher"
]
KINDS: tuple[Kind, ...] = get_args(Kind)

STOP_SHARE = 0.15  # of all faults; the others are kills
STOP_S = (0.5, 8.0)
CLOSE_SHARE = 0.25  # of faults that strike before the one before can have healed
CLOSE_S = (0.0, 0.7)
APART_S = (0.5, 3.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Strike:
    """A fault to come, on a process of `kind`: SIGSTOP for `stop_s`, or kill -9 if that is 0.

    `gap_s` after the one before if they are to be `close`, else so long after the first step that followed that one.
    """

    gap_s: float
    close: bool
    kind: Kind
    stop_s: float


class Dice:
    """Draws strikes without end. Kills go round all kinds in random order, so that each gets its share; so do stops."""

    def __init__(self, seed: int, kinds: Sequence[Kind] = KINDS) -> None:
        self._random = Random(seed)
        self._kinds = tuple(kinds)
        self._kills: list[Kind] = []
        self._stops: list[Kind] = []

    def draw(self) -> Strike:
        """The next strike."""
        random = self._random
        close = random.random() < CLOSE_SHARE
        gap_s = random.uniform(*(CLOSE_S if close else APART_S))
        if random.random() < STOP_SHARE:
            return Strike(gap_s, close, self._next(self._stops), random.uniform(*STOP_S))
        return Strike(gap_s, close, self._next(self._kills), 0.0)

    def put_back(self, strike: Strike) -> None:
        """It did not come about: its kind is drawn again."""
        (self._stops if strike.stop_s else self._kills).append(strike.kind)

    def pick(self, names: Sequence[str]) -> str:
        """One of several processes of a kind."""
        return self._random.choice(sorted(names))

    def _next(self, bag: list[Kind]) -> Kind:
        if not bag:
            bag.extend(self._random.sample(self._kinds, len(self._kinds)))
        return bag.pop()


@dataclasses.dataclass(slots=True)
class Fault:
    """A fault that was inflicted, at a Unix time. A stop ended at `ended_s`, by SIGCONT; a kill ends as it begins."""

    kind: Kind
    victim: str
    pid: int
    at_s: float
    ended_s: float
    stop: bool = False
