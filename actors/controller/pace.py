"""How many groups to keep in flight, so that nobody waits for work and nothing grows stale. Pure.

In flight is a group from its admission until the trainer takes its batch: live groups, and those of a batch that is
formed and waits for the trainer. By Little's law a group is in flight for (groups in flight / B) steps, whatever the
speed of workers, rewards and trainer, and however that changes: so this one number sets the age of what is trained.

The pace measures that age on each batch that is formed, the mean of (step - version) over its tokens, and steers it.
The first of these that holds:

    something was too old to be trained             less in flight
    older than the goal and its slack               less, in proportion
    half a batch is complete or unbegun to spare    less: it would only lie there
    younger than the goal, the trainer waited,
      and workers have begun all there is           more, in proportion
    older than one step, and no trainer waited      a little less, until it does: then the trainer sets the pace

With B in flight and workers quicker than the trainer, batch i + 1 is generated while batch i is trained: age 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from schemas import Segments

SLACK = 0.25  # of the goal: an age so little above it is left alone, lest the limit swings
GAIN = 0.25  # batches a step for each version of age too much or too little; an answer takes two or three steps to show
CUT = 0.125  # batches a step
DECAY = 1 / 64  # batches a step: an eighth of what one wait of the trainer adds
DISCARDED = 0.005  # share of tokens too old to be trained that is put up with
START = 1.5  # batches: less starts slowly, more is stale before it is measured


@dataclasses.dataclass(frozen=True, slots=True)
class Formed:
    """What a batch tells when it is formed.

    `age` is the mean of its tokens in versions, None if there is none; `discarded` the share of them that is too old,
    dropped samples among them. `ready_left` complete groups remain, `unbegun` prompts are with no worker.
    """

    age: float | None
    discarded: float
    trainer_waited: bool
    ready_left: int
    unbegun: int


class Pace:
    """The limit of groups in flight, between one batch and what the staleness bound allows.

    `goal` is the mean age to settle at, in versions; None lets the limit stay at the bound.
    """

    def __init__(self, batch_groups: int, group_size: int, max_staleness: int, goal: float | None) -> None:
        self._batch = batch_groups
        self._enough = max(1, batch_groups // 2)
        self._enough_unbegun = max(1, batch_groups * group_size // 2)
        self._most = (max_staleness + 1) * batch_groups
        self._goal = goal
        self._exact = float(self._most if goal is None else min(self._most, START * batch_groups))
        self.age: float | None = None  # of the newest batch

    @property
    def limit(self) -> int:
        """Groups that may be in flight."""
        return max(self._batch, min(self._most, round(self._exact)))

    def batch_formed(self, batch: Formed) -> None:
        """Adapt after a batch."""
        self.age = batch.age
        if self._goal is not None and batch.age is not None:
            changed = self._exact + self._batch * self._change(batch, batch.age, self._goal)
            self._exact = max(float(self._batch), min(float(self._most), changed))

    def _change(self, batch: Formed, age: float, goal: float) -> float:
        """In batches."""
        if batch.discarded > DISCARDED:
            return -CUT
        if age > goal * (1 + SLACK):
            return GAIN * (goal - age)
        if batch.ready_left >= self._enough or batch.unbegun > self._enough_unbegun:
            return -CUT
        if batch.trainer_waited:
            return GAIN * (goal - age) if age < goal and batch.unbegun == 0 else 0.0
        return -DECAY if age > 1 else 0.0


def age_and_discarded(step: int, max_staleness: int, answers: Iterable[Segments]) -> tuple[float | None, float]:
    """Of all tokens of `answers`: the mean of `step - version`, None if there is no token, and the share above η."""
    tokens = aged = too_old = 0
    for segments in answers:
        for version, count in segments:
            tokens += count
            aged += count * (step - version)
            too_old += count * (step - version > max_staleness)
    return (aged / tokens, too_old / tokens) if tokens else (None, 0.0)
