"""Where the samples in flight are, and so who holds the run up: for people, nothing is decided by it. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.controller.core import ControllerCore


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """Samples whose prompts no worker has begun, that workers generate, and that wait for their reward or get it."""

    unbegun: int = 0
    generating: int = 0
    scoring: int = 0

    def limit(self, core: ControllerCore) -> str:
        """What the controller waits for, in the words that its beat and the screen show."""
        if core.newest_version < 0:
            return "the first weights"
        if core.paused:
            return "somebody to resume the run"
        if core.next_step > core.newest_version + 1:  # a batch lies ready, and the one before it is being trained
            return "the trainer"
        return "rewards" if self.scoring > self.unbegun + self.generating else "generation"
