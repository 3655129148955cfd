"""Where what reads logs prints: wide enough for tables when nobody's terminal sets the width."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import IO

from rich.console import Console

PIPED_WIDTH = 120


def open_console(file: IO[str] | None = None) -> Console:
    """A console on standard output, or on `file`; `COLUMNS` holds if it is set."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(file=file, highlight=False, width=PIPED_WIDTH)
    return console


def tell_damage(damage: Iterable[str], console: Console) -> None:
    """What of a log could not be read, and so is left out of what was told."""
    for sentence in damage:
        console.print(f"damage: {sentence}", style="yellow", markup=False, soft_wrap=True)
