"""What an audit promises to check, and what it found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

EXAMPLES_MAX: Final = 100  # broken cases kept in words; all are counted
DEAD_LETTERS_MAX: Final = 100  # likewise

PROMISES: Final = {
    "I1": "a token trained in step i is 0 to η versions old",
    "I2": "every admitted sample ends in a batch or in a drop",
    "I3": "no sample is trained twice, no step is done twice",
    "I4": "versions rise by one and their bytes are those announced",
    "I5": "every token carries the version that made it",
    "I6": "groups at work never exceed (η + v + 1)·B",
    "I7": "the same log and the same start give the same weights",
    "turns": "no token is trained that the model did not make",
    "log": "records refer to what is there",
}
REPLAYED: Final = "I7"  # checked by training again, and only if that is asked for


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What a start of the run told its actors, from the broker's time `since_s` on."""

    since_s: float
    max_staleness: int
    batch_groups: int
    steps: int


@dataclasses.dataclass(slots=True)
class Check:
    """One invariant: how many cases were looked at, how many break it, and the first of those in words."""

    name: str
    checked: int = 0
    broken: int = 0
    examples: list[str] = dataclasses.field(default_factory=list)

    def fail(self, what: str) -> None:
        """Note a broken case."""
        self.broken += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(what)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The outcome. `totals` are counts by name; `dead_letters` say which entry, which id and why."""

    ended: bool
    checks: tuple[Check, ...]
    totals: Mapping[str, int]
    dead_letters: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether every invariant holds."""
        return not any(check.broken for check in self.checks)
