"""Calling a loss or an advantage function of the user's: what it raises is told with its line. No torch here."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from actors.lines import their_line
from schemas.errors import UserError

_MACHINE = ("MemoryError", "OutOfMemoryError", "AcceleratorError")  # torch's too: no fault of the line, try again


def call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns; `what` names it, such as "The loss mine.py:loss".

    Raises `UserError` if it raises, unless that is the machine's doing: it would raise again each time.
    """
    try:
        return function(*arguments)
    except Exception as error:
        if isinstance(error, UserError) or type(error).__name__ in _MACHINE:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        where = their_line((frame.filename, frame.lineno) for frame in frames)
        raise UserError(
            f"{what} raised {type(error).__name__}{f' in {where}' if where else ''}: {error}",
            "Mend the function, then continue with --resume; the batch is trained again.",
        ) from error
