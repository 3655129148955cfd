"""Which reward function fits which data."""

from collections.abc import Mapping
from typing import Any

from ops.datasets.config import GYM
from ops.datasets.formats import FORMATS
from schemas import UserError

_READS_ANSWER = ("exact", "numeric", "math_verify", "choice")


def fitting_reward(data: Mapping[str, Any]) -> str | None:
    """The built-in function for a `data` section that says what its rows are; None if it does not."""
    if str(data.get("train", "")).startswith(GYM):
        return "reasoning_gym"
    format = FORMATS.get(str(data.get("format")))
    return format.rewards[0] if format is not None and format.rewards else None


def check_reward(function: str, row: Mapping[str, Any], format: str) -> None:
    """Raise `UserError` if a built-in reward function finds nothing in a row to score by."""
    fitting = suggested(row, format)
    lacks = (
        (function in _READS_ANSWER and row.get("answer") is None and "tests" in row and "no 'answer', but tests")
        or (function == "code" and not row.get("tests") and "no tests")
        or (function == "reasoning_gym" and "reasoning_gym" not in row and "no reasoning-gym problem")
    )
    if lacks:
        raise UserError(
            f"reward.function is {function}, but the rows of the data ({format}) have {lacks}.",
            f"Set reward.function to {fitting}." if fitting else "Set reward.function to one that fits the data.",
        )


def suggested(row: Mapping[str, Any], format: str) -> str | None:
    """The built-in function that fits a row, None if none is known to."""
    if "reasoning_gym" in row:
        return "reasoning_gym"
    if FORMATS[format].rewards:
        return FORMATS[format].rewards[0]
    return "code" if "tests" in row else None
