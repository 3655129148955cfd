"""When a run comes to nothing: samples that failed since the last batch, and whether a batch can still be hoped for.

The rule: since the last batch as many samples failed as a batch has, `FAILED_MIN` at least, and they are `FAILED_SHARE`
of all that ended. Then the run ends with the newest reason, for its owner to mend.

Why so. What failed is what somebody could mend: an error, a timeout, an invalid verdict. What was left out by intent,
for its equal rewards, for its age, by a filter, is a sample that worked, so it counts as one. A share alone would end a
run at its first bad sample, a number alone one that is filtered for long and meets a bad row now and then. Of a run in
which eight of ten samples fail the others still make batches, slowly; it goes on, and its screen tells what it loses.
"""

from __future__ import annotations

from schemas import DropReason, UserError
from schemas.errors import mend_and_resume
from schemas.messages import FAILURE_REASONS

FAILED_MIN = 64
FAILED_SHARE = 0.9


class Failures:
    """Counts since the last batch, in one controller's life: what the log held before, a predecessor has judged."""

    def __init__(self, batch_samples: int) -> None:
        self._enough = max(FAILED_MIN, batch_samples)
        self._failed = 0
        self._worked = 0
        self._newest = ""

    def lost(self, reason: DropReason, detail: str) -> None:
        """A sample was dropped."""
        if reason in FAILURE_REASONS:
            self._failed += 1
            self._newest = f"{reason}: {detail}" if detail else reason

    def worked(self) -> None:
        """A sample was scored."""
        self._worked += 1

    def begin(self) -> None:
        """A batch was formed: the run gets on."""
        self._failed = self._worked = 0

    def check(self) -> None:
        """Raises `UserError` if the run comes to nothing."""
        ended = self._failed + self._worked
        if self._failed < self._enough or self._failed < FAILED_SHARE * ended:
            return
        raise UserError(
            f"{self._failed} of the {ended} samples that ended since the last batch failed. "
            f"The newest: {self._newest}.",
            mend_and_resume("what was dropped stays so"),
        )
