"""Who joins and who leaves, when and how: drawn from a seed."""

from __future__ import annotations

import dataclasses
from random import Random

GAP_S = (10.0, 20.0)
FIRST = (6, 1)  # from 2; after that any number up to the most
MOST = 6
KILL_SHARE = 0.5  # of those that leave; the others are asked to
HIT_SHARE = 0.25  # of moves in which one that stays is killed too, and is started again


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """After `gap_s` there shall be `workers`. `killed` are those among the leaving, and maybe one that stays, that get
    SIGKILL; who else leaves gets SIGTERM.
    """

    gap_s: float
    before: int
    workers: int
    killed: tuple[int, ...]


class Moves:
    """Draws moves without end, from `workers` at the start."""

    def __init__(self, seed: int, workers: int = 2) -> None:
        self._random = Random(seed)
        self._workers = workers
        self._first = list(FIRST)

    def draw(self) -> Move:
        """The next move: never to the number that there is."""
        random, before = self._random, self._workers
        others = [count for count in range(1, MOST + 1) if count != before]
        self._workers = self._first.pop(0) if self._first else random.choice(others)
        killed = [number for number in range(self._workers, before) if random.random() < KILL_SHARE]
        if random.random() < HIT_SHARE:
            killed.append(random.randrange(min(before, self._workers)))
        return Move(random.uniform(*GAP_S), before, self._workers, tuple(sorted(killed)))
