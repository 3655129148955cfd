"""Metrics as TensorBoard's event files: scalars, the histogram of staleness, the recipe as text and hyperparameters.

All of a step is one record of the file, so a reader sees it whole or not at all. A writer that begins again begins
another file, as all do; TensorBoard reads those of a folder one after the other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bus.table import EVALUATIONS, STEPS
from ops.metrics.records import Key, Record
from schemas import UserError

if TYPE_CHECKING:
    from types import ModuleType

MARKS = {STEPS.name: "reward_mean", EVALUATIONS.name: "eval/count"}  # tags that every record of a stream has
FRAME = struct.Struct("<QI")  # length and its checksum, before the bytes; a checksum of theirs stands behind
_REMEDY = "pip install 'rollstream[tensorboard]'"


def need_tensorboard() -> tuple[ModuleType, ModuleType, ModuleType]:
    """The parts of tensorboardX: summaries, their protocol, and the writer of files. Raises `UserError`."""
    try:
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2
    except ImportError as error:
        raise UserError(f"TensorBoard's files need tensorboardX: {error}.", _REMEDY) from None
    return summary, event_pb2, event_file_writer


class EventFiles:
    """Event files in `folder`, of one run. Raises `UserError` if they cannot be written."""

    def __init__(self, folder: Path, run: str, recipe_yaml: str) -> None:
        self._summary, self._proto, writer = need_tensorboard()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._known = {(stream, at) for path in _files(folder) for stream, at in self._told(path)}
            # Its name ends in the second of its beginning: one that begins within the same second is another file.
            self._file = writer.EventsWriter(str(folder / "events"), filename_suffix=f".{len(_files(folder))}")
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}.", "Name another folder.") from None
        self._written: set[Key] = set()
        if not self._known:
            self._begin(run, recipe_yaml)

    def _begin(self, run: str, recipe_yaml: str) -> None:
        told = "\n".join("    " + line for line in recipe_yaml.splitlines())
        parts = [self._summary.text("recipe", f"**{run}**\n\n{told}")]
        parts += self._summary.hparams(dict(_leaves(yaml.safe_load(recipe_yaml) or {})), {"reward": 0.0})
        for part in parts:
            self._file.write_event(self._proto.Event(step=0, summary=part))
        self._file.flush()

    def has(self, record: Record) -> bool:
        """See `Sink`."""
        return record.key in self._written or (record.key[0], record.at) in self._known

    def write(self, record: Record) -> None:
        """See `Sink`."""
        whole = self._proto.Event(wall_time=record.time_s, step=record.at)
        for name, value in record.values.items():
            whole.summary.value.add(tag=name, simple_value=value)
        if sum(record.staleness):
            whole.summary.MergeFrom(self._histogram(record.staleness))
        self._file.write_event(whole)
        self._file.flush()
        self._written.add(record.key)

    def _histogram(self, staleness: tuple[int, ...]) -> Any:
        ages = [age for age, tokens in enumerate(staleness) if tokens]
        return self._summary.histogram_raw(
            "staleness",
            min=ages[0] - 0.5,
            max=ages[-1] + 0.5,
            num=sum(staleness),
            sum=sum(age * tokens for age, tokens in enumerate(staleness)),
            sum_squares=sum(age * age * tokens for age, tokens in enumerate(staleness)),
            bucket_limits=[age + 0.5 for age in range(len(staleness))],
            bucket_counts=list(staleness),
        )

    def close(self) -> None:
        """See `Sink`."""
        self._file.close()

    def _told(self, path: Path) -> Iterator[tuple[str, int]]:
        for data in _frames(path):
            event = self._proto.Event.FromString(data)
            tags = {value.tag for value in event.summary.value}
            yield from ((stream, event.step) for stream, mark in MARKS.items() if mark in tags)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*"))


def _frames(path: Path) -> Iterator[bytes]:
    """The records of an event file, up to one that was cut when its writer was killed."""
    with path.open("rb") as file:
        while len(head := file.read(FRAME.size)) == FRAME.size:
            (length, _) = FRAME.unpack(head)
            data = file.read(length)
            if len(data) < length or len(file.read(4)) < 4:
                return
            yield data


def _leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | float | bool]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float | bool):
            yield f"{prefix}{name}", value
