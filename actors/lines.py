"""Whose line of code it is: an error, or a call that blocks, is told by the line of the user's that led there."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_OURS = tuple(_ROOT / name for name in ("actors", "bus", "ops", "schemas", "cli.py"))
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@lru_cache(maxsize=4096)
def is_theirs(file: str) -> bool:
    """Whether a source file is neither ours nor a library's."""
    path = Path(file)
    return path.is_absolute() and not any(path.is_relative_to(folder) for folder in (*_OURS, *_LIBRARIES))


def their_line(frames: Iterable[tuple[str, int | None]]) -> str:
    """`task.py, line 12`: the last of these (file, line) that is the user's; empty if none is."""
    found = [f"{file}, line {line}" for file, line in frames if is_theirs(file)]
    return found[-1] if found else ""
