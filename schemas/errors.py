"""Errors that a person can act on, and errors in bytes that came from outside."""

from collections.abc import Sequence


class UserError(Exception):
    """Something that the user can mend: one sentence on what is wrong, one on what to do.

    The CLI prints both and exits with status 2; no traceback, since our code is not at fault.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


def did_you_mean(names: Sequence[str]) -> str:
    """The remedy for a name that is near to these."""
    return f"Did you mean {' or '.join(names)}?"


def mend_and_resume(kept: str) -> str:
    """The remedy for what the user's function does to a run; `kept` tells what becomes of its samples."""
    return f"Mend it and continue with `rollstream run RECIPE --resume`; {kept}."


class MalformedMessage(ValueError):
    """Bytes or values that are no valid message: truncated, oversized, unknown, of another version, or hostile.

    Always the sender's fault. `reason` is a short sentence for the dead letter.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
