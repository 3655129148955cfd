"""Which versions are due for evaluation, and which of them are still to be done: a fold over the log."""

from __future__ import annotations

from schemas import Evaluation


def lease_name(version: int) -> str:
    """The lease of whoever evaluates a version."""
    return f"evaluation-{version}"


class Schedule:
    """Versions 0, `every`, 2·`every`, ... and the last are due; every = 0 makes it the first and the last.

    The last is `steps`, or the newest if the run went further before. Only evaluations on `data` count.
    """

    def __init__(self, every: int, steps: int, data: str) -> None:
        self.every = every
        self.steps = steps
        self.data = data
        self.newest = 0  # version 0 is there before it is announced: the model that the run begins with
        self.done: set[int] = set()

    def announced(self, version: int) -> None:
        """Take the announcement of a version."""
        self.newest = max(self.newest, version)

    def evaluated(self, message: Evaluation) -> None:
        """Take an evaluation, whoever did it, with what was skipped for it."""
        if message.data == self.data:
            self.done.add(message.version)
            self.done.update(message.skipped.tolist())

    def gave_up(self, version: int) -> None:
        """There will be no evaluation of this version."""
        self.done.add(version)

    @property
    def last(self) -> int:
        """The version that ends the run."""
        return max(self.steps, self.newest)

    @property
    def finished(self) -> bool:
        """Whether nothing will be due any more."""
        return self.newest >= self.steps and {0, self.last} <= self.done

    @property
    def open(self) -> list[int]:
        """Versions that are due, announced and not done, the newest first."""
        due = set(range(0, self.newest + 1, self.every)) if self.every else {0}
        if self.newest >= self.steps:
            due.add(self.newest)
        return sorted(due - self.done, reverse=True)

    def passed_by(self, version: int) -> list[int]:
        """Open versions that are skipped if this one is taken: the older ones, but for the first, which can wait."""
        return [other for other in self.open if 0 < other < version]
