"""Makes a failing scenario smaller: first fewer faults, then a smaller run, as long as the same promise is broken.

Faults have numbers, so a run can be repeated with any subset of those that struck (`Scenario.only`). Which subset is
enough is found by delta debugging: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from ops.sim.run import Outcome, simulate
from ops.sim.scenario import Scenario, kind_of

SHRINK_S: Final = 60.0  # real seconds spent on one scenario
# What a smaller run may have instead, the smallest first.
SMALLER: Final[dict[str, tuple[Any, ...]]] = {
    "trainers": (1,),
    "controllers": (1,),
    "workers": (1, 2),
    "rewarders": (1,),
    "episodes": (0, 1),
    "max_turns": (16,),
    "max_tokens": (None,),
    "per_turn": (False,),
    "at_once": (64,),
    "more_steps": (0,),
    "later": ({},),
    "steps": (1, 2, 3, 4),
    "batch_groups": (1, 2),
    "group_size": (1, 2),
    "max_staleness": (0, 1, 2),
    "filter": ("none",),
    "on_stale": ("mask",),
    "on_update": ("recompute",),
    "partial_every": (0,),
    "pace": (True,),
    "shared": (True,),
    "equal_share": (0.0,),
    "slots": (4,),
    "max_new_tokens": (24,),
    "mean_tokens": (6,),
    "checkpoint_every": (2,),
    "keep_checkpoints": (2,),
    "keep_versions": (2,),
    "full_every": (1,),
    "overlap": (False,),
    "dedupe_window_s": (120.0,),
    "deadline_s": (120.0,),
    "token_s": (0.03,),
    "reward_s": (0.1,),
    "train_s": (0.2,),
    "swap_s": (0.05,),
    "network_s": (0.003,),
    "disk_s": (0.01,),
    "ack_wait_s": (3.0,),
    "restart_s": (0.5,),
    "quiet_s": (20.0,),
}


def shrink(failed: Outcome, run: Callable[[Scenario], Outcome] = simulate, seconds: float = SHRINK_S) -> Outcome:
    """The outcome of the smallest scenario found that breaks the same invariant as `failed` did."""
    return _Shrinker(failed, run, time.monotonic() + seconds).smallest()


class _Shrinker:
    def __init__(self, failed: Outcome, run: Callable[[Scenario], Outcome], until_s: float) -> None:
        self.best = failed
        self._invariant = failed.violations[0].invariant
        self._run = run
        self._until_s = until_s

    def smallest(self) -> Outcome:
        before = None
        while self.best.scenario != before and not self._late:
            before = self.best.scenario
            if self._fails(only=self.best.struck):
                self._fewer_faults()
            for field, smaller in SMALLER.items():
                self._smaller(field, smaller)
            self._fewer_kinds()
        return self.best

    @property
    def _late(self) -> bool:
        return time.monotonic() > self._until_s

    def _fails(self, **changes: Any) -> bool:
        """Whether the best scenario with these changes breaks the same promise; then it is the best."""
        if self._late:
            return False
        outcome = self._run(dataclasses.replace(self.best.scenario, **changes))
        if not any(violation.invariant == self._invariant for violation in outcome.violations[:1]):
            return False
        self.best = outcome
        return True

    def _fewer_faults(self) -> None:
        """Delta debugging over the faults that struck: leave out ever smaller parts of them."""
        for kind in sorted({kind_of(fault) for fault in self.best.scenario.only or ()}):
            self._fails(only=tuple(fault for fault in self.best.scenario.only or () if kind_of(fault) != kind))
        parts = 1
        while (faults := self.best.scenario.only) and parts <= len(faults):
            if any(self._fails(only=rest) for rest in _without_a_part(faults, parts)):
                parts = max(1, parts // 2)
            elif parts == len(faults):
                return
            else:
                parts = min(len(faults), 2 * parts)

    def _smaller(self, field: str, smaller: tuple[Any, ...]) -> None:
        for value in smaller:
            now = getattr(self.best.scenario, field)
            if value == now or (isinstance(value, int) and not isinstance(value, bool) and value > now):
                continue
            if self._fails(**{field: value}):
                return

    def _fewer_kinds(self) -> None:
        """Kinds of which none is left to strike; without them the others draw differently, so it may fail to fail."""
        used = {kind_of(fault) for fault in self.best.scenario.only or ()}
        kept = {kind: rate for kind, rate in self.best.scenario.faults.items() if kind in used}
        if kept != self.best.scenario.faults and not self._fails(faults=kept):
            for kind in sorted(self.best.scenario.faults.keys() - used):
                self._fails(faults={other: rate for other, rate in self.best.scenario.faults.items() if other != kind})


def _without_a_part(faults: tuple[str, ...], parts: int) -> Iterator[tuple[str, ...]]:
    size = -(-len(faults) // parts)
    for start in range(0, len(faults), size):
        yield faults[:start] + faults[start + size :]
