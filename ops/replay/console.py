"""Where replays and traces print: wide enough for tables when nobody's terminal sets the width."""

from __future__ import annotations

import os
from typing import IO

from rich.console import Console

PIPED_WIDTH = 120


def open_console(file: IO[str] | None = None) -> Console:
    """A console on standard output, or on `file`; `COLUMNS` holds if it is set."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(file=file, highlight=False, width=PIPED_WIDTH)
    return console
