"""How many episodes a worker begins: no more than those whose turns the engines take up.

An episode whose turn waits for an engine is not running anywhere, so its prompt is better left with the log, for any
worker that joins. The measure is the queue of turns that no rollout worker has taken yet. While it is no longer than
what is answered between two looks, the engines never run dry, and the worker may have a few episodes more; while it is
longer, those that end are not replaced.

    turns waiting                              episodes that the worker may have
    <= max(STEP, answered in `LOOK_S`)         as many as it has, and `step` more, until the next look
    more                                       those that it has; none that ends is replaced until the next look

Workers of one recipe have the same `step`, and are given prompts in turn. So whoever has more than the others loses
more while the queue is long, wins no more while it is short, and in the end all have as many.
"""

from __future__ import annotations

LOOK_S = 0.25  # between two looks, on average
LOOK_SOON_S = 0.02  # once the worker has all that it may have: by then its new turns are queued, or taken
STEP = 8  # episodes that a worker may begin between two looks, at least
STEPS = 16  # looks, at most, until a worker that has nothing has all that it may have


class Capacity:
    """The room of a worker that runs at most `at_once` episodes."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._step = max(STEP, at_once // STEPS)
        self._answered = 0  # turns of all episodes, when the last `LOOK_S` began
        self._lately = 0  # of them in the one before
        self._since_s = 0.0
        self.room = min(self._step, at_once)
        """Another one is begun while the worker has fewer."""

    def looked(self, now_s: float, running: int, waiting: int, answered: int) -> None:
        """Adapt: it runs so many episodes, so many turns wait for an engine, so many were answered in all."""
        if now_s - self._since_s >= LOOK_S / 2:
            self._lately, self._answered, self._since_s = answered - self._answered, answered, now_s
        self.room = min(self._at_once, running + self._step) if waiting <= max(STEP, self._lately) else 0

    def filled(self, running: int) -> bool:
        """Whether the worker has all that it may have, and might have more: then it is worth while to look soon."""
        return 0 < self.room <= running < self._at_once
