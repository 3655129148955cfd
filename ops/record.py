"""`rollstream record`: a run's whole log, its recipe and its initial model in one portable file.

The file is written aside and gets its name when all of it is on the disk, so what bears that name is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from bus.table import (
    ANSWERS,
    BATCHES,
    CONTROL,
    DEAD,
    DROPPED,
    EVALUATIONS,
    NOTES,
    PARTIALS,
    PROMPTS,
    ROLLOUTS,
    SCORED,
    STEPS,
    TURNS,
    WEIGHTS,
)
from bus.weights import sync_folder
from ops.log_source import LogSource, initial_model_of, open_log
from ops.progress import Progress
from ops.recording.format import SUFFIX
from ops.recording.reader import Recording
from ops.recording.writer import RecordingWriter
from schemas import UserError

# What the rest refers to, which is small, before the bulk: a file that was cut off has lost least.
WRITE_ORDER = (
    CONTROL, WEIGHTS, EVALUATIONS, STEPS, BATCHES, DROPPED, DEAD, PARTIALS, PROMPTS, SCORED, NOTES, TURNS, ANSWERS,
    ROLLOUTS,
)  # fmt: skip


async def main(target: str | None, out: Path | None, with_model: bool) -> int:
    """Record a run and say where and what; always 0."""
    async with open_log(target) as log:
        if isinstance(log, Recording):
            raise UserError(f"{target} is a recording already.", "Name a run.")
        path = out or Path(f"{log.run}{SUFFIX}")
        model = initial_model_of(log, path) if with_model else None
        started = time.monotonic()
        with contextlib.closing(Progress("recording")) as progress:
            writer = await record(log, path, model, progress)
    seconds = time.monotonic() - started
    print(f"{path}: {writer.entries:,} entries, {writer.nbytes / 1e6:,.1f} MB, in {seconds:.1f} s")
    print(f"check it with: rollstream audit {path}")
    return 0


async def record(log: LogSource, path: Path, model: Path | None, progress: Progress | None = None) -> RecordingWriter:
    """Write a log as it is now into a new file, with the files of `model` if given; `progress` is shown, if given.

    Raises:
        UserError: the file exists or cannot be written, or the log is damaged.
    """
    cut = await log.cut()
    files = {} if model is None else {file.relative_to(model).as_posix(): file.stat().st_size for file in _files(model)}
    progress = progress or Progress("recording", shown=False)
    progress.total = sum(info.messages for info in cut.streams.values())
    with _aside(path) as file:
        writer = RecordingWriter(file, log.run, log.recipe_yaml, cut, files)
        for name in files:
            assert model is not None
            with (model / name).open("rb") as content:
                await asyncio.to_thread(writer.add_file, name, content)
        for stream in WRITE_ORDER:
            async for entry in log.read(stream, 1, cut.of(stream).last_seq + 1):
                if writer.add(entry):
                    await asyncio.to_thread(writer.flush)
                    progress.show(writer.entries)
        await asyncio.to_thread(writer.finish)
        if log.damage:
            raise UserError(f"{log.run} cannot be recorded: {log.damage[0]}.", "Read `rollstream audit` of it.")
    return writer


def _files(model: Path) -> list[Path]:
    return sorted(path for path in model.rglob("*") if path.is_file())


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name `path` when the block ends well, and is gone otherwise."""
    if path.exists():
        raise UserError(f"{path} exists and is left as it is.", "Name another file with --out.")
    aside = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        remedy = (
            "Free some space, or name another place with --out." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        )
        raise UserError(
            f"{path} cannot be written: {error.strerror}.", remedy or "Name another place with --out."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
