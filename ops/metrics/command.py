"""`rollstream metrics`: what a run told of its steps and evaluations, into files or onto the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ops.log_source import LogSource, open_log
from ops.metrics.feed import copy
from ops.metrics.jsonl import JsonLines, Printed
from ops.metrics.records import Sink
from ops.metrics.tensorboard import EventFiles, need_tensorboard
from ops.progress import stopped_by_ctrl_c
from schemas import UserError


async def main(target: str | None, jsonl: str | None, tensorboard: Path | None, follow: bool) -> int:
    """Write the metrics of a run or a recording; 0, or 130 after Ctrl-C.

    `jsonl` is a file or `-` for standard output, which it also is if nothing is named.

    Raises:
        UserError: the log cannot be read, or a sink cannot be written.
    """
    if tensorboard is not None:
        need_tensorboard()
    async with open_log(target) as source:
        with ExitStack() as stack, stopped_by_ctrl_c() as stop:
            sinks = _sinks(source, jsonl, tensorboard)
            for sink in sinks:
                stack.callback(sink.close)
            try:
                written = await copy(source, sinks, follow, stop)
            except BrokenPipeError:
                raise
            except OSError as error:
                raise UserError(f"The metrics cannot be written: {error}.", "Is the disk full?") from error
            for sentence in source.damage:
                print(sentence, file=sys.stderr)
            if (jsonl or "-") != "-" or tensorboard is not None:
                where = " and ".join(str(place) for place in (jsonl, tensorboard) if place is not None)
                print(f"{written} steps and evaluations written to {where}", file=sys.stderr)
            return 130 if stop.is_set() else 0


def _sinks(source: LogSource, jsonl: str | None, tensorboard: Path | None) -> Sequence[Sink]:
    sinks: list[Sink] = []
    if tensorboard is not None:
        sinks.append(EventFiles(tensorboard, source.run, source.recipe_yaml))
    if jsonl == "-" or (jsonl is None and tensorboard is None):
        sinks.append(Printed(source.run))
    elif jsonl is not None:
        sinks.append(JsonLines(Path(jsonl), source.run))
    return sinks
