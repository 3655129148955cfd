"""Which processes are sandboxes and the programs in them, for tests that kill them."""

import contextlib

import psutil


def words(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def in_sandboxes(family: list[psutil.Process]) -> list[psutil.Process]:
    """Those that belong to sandboxes: bubblewrap, its supervisor, and the program."""
    return [process for process in family if "/supervisor.pyc" in words(process)]


def programs(family: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run a program: bubblewrap starts the supervisor, and that forks the program."""
    return [process for process in in_sandboxes(family) if _is_program(process)]


def _is_program(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return parent is not None and "/supervisor.pyc" in words(parent) and "bwrap" not in parent.name()
    return False
