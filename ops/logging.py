"""Logs: events with fields, readable on a terminal, JSON elsewhere and in the actor's file in the run folder."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

NOISY = (
    "nats",
    "matplotlib",
    "urllib3",
    "httpx",
    "huggingface_hub",
    "filelock",
)  # they warn of what we handle or do not use


def configure(file: Path | None = None, *, run: str = "", actor: str = "", console: bool = True) -> None:
    """Send all log events of this process to `file` as JSON lines, and to standard error.

    Standard error gets readable lines if it is a terminal; if it is not, JSON lines, but only if there is no `file`.
    `console=False` leaves it alone, for a process that draws on the terminal. Every line carries `run` and `actor`.
    Warnings of libraries that use the standard `logging` come along as `library_warned`.

    Raises:
        OSError: the file cannot be written.
    """
    lines: TextIO | None = None
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.open("a", encoding="utf-8", buffering=1)
    readable = console and sys.stderr.isatty()
    machine = sys.stderr if console and not readable and lines is None else lines
    always = {key: value for key, value in (("run", run), ("actor", actor)) if value}
    output = _Output(machine, sys.stderr if readable else None, always)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _hand_over,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: output,
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_Library()], level=logging.WARNING, force=True)
    quiet_libraries()
    warnings.showwarning = _warned


def quiet_libraries() -> None:
    """Keep from a person what libraries warn of and we handle or do not use."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_worth_saying)


def _worth_saying(record: logging.LogRecord) -> bool:
    """DeepSpeed, which transformers imports where it is installed, warns of each machine that has no GPU."""
    return "Setting accelerator to CPU" not in record.getMessage()


class _Output:
    """Where events end: one JSON line, one readable line, or both."""

    def __init__(self, machine: TextIO | None, readable: TextIO | None, always: dict[str, str]) -> None:
        self._machine = machine
        self._readable = readable
        self._always = always
        self._draw = structlog.dev.ConsoleRenderer(colors=readable is not None)

    def msg(self, event: dict[str, Any]) -> None:
        """Write one event. A sink that is gone, or a full disk, must not end an actor."""
        head = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
        event = head | self._always | event
        try:
            if self._readable is not None:
                print(self._draw(None, "", dict(event)), file=self._readable, flush=True)
            if self._machine is not None:
                plain = structlog.processors.format_exc_info(None, "", dict(event))
                self._machine.write(json.dumps(plain, default=str, ensure_ascii=False) + "\n")
                self._machine.flush()
        except (OSError, ValueError):
            pass

    debug = info = warning = error = critical = exception = fatal = warn = msg


def _hand_over(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[EventDict], dict[str, Any]]:
    return (event,), {}


class _Library(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().warning("library_warned", library=record.name, said=record.getMessage())


def _warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: object = None,
) -> None:
    at = f"{filename}:{lineno}"
    structlog.get_logger().warning("python_warned", category=category.__name__, said=str(message), at=at)
