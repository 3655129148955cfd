"""Making recordings for tests, and reading all that is left of one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from bus.port import Entry
from ops.invariants import READ_ORDER
from ops.record import record
from ops.recording.directory import directory_of
from ops.recording.format import BLOCK_BYTES, Block
from ops.recording.reader import open_recording
from tests.ops.sound_log import Log, LogInLists, whole_run

MODEL = {"config.json": b"{}", "tokenizer.json": b"[1, 2]", "model.safetensors": bytes(range(256)) * 9}
SMALL_BLOCK_BYTES = 1500


@dataclasses.dataclass(frozen=True)
class Place:
    """A block in a file, and where it begins and ends there."""

    start: int
    end: int
    block: Block


async def make_recording(
    path: Path, monkeypatch: pytest.MonkeyPatch, log: Log | None = None, with_model: bool = True
) -> Path:
    """A recording of a sound log in many small blocks, with a model of some bytes."""
    monkeypatch.setattr("ops.recording.writer.BLOCK_TARGET_BYTES", SMALL_BLOCK_BYTES)
    monkeypatch.setattr("ops.recording.writer.FILE_PIECE_BYTES", 1000)
    model = path.with_name(f"{path.name}-model")
    model.mkdir(exist_ok=True)
    for name, content in MODEL.items():
        (model / name).write_bytes(content)
    await record(LogInLists(log or whole_run()), path, model if with_model else None)
    return path


def places_of(path: Path) -> list[Place]:
    """The blocks of a whole recording, without its index."""
    with path.open("rb") as file:
        directory = directory_of(file.fileno())
    assert not directory.damage
    return [Place(at, at + BLOCK_BYTES + block.stored, block) for at, block in directory.places]


async def all_of(path: Path) -> tuple[dict[tuple[str, int], Entry], tuple[str, ...]]:
    """What can be read of a recording, by stream and sequence, and what is said to be wrong with it."""
    with open_recording(path) as recording:
        entries = {(stream.name, entry.seq): entry for stream in READ_ORDER async for entry in recording.read(stream)}
        recording.check_files()
        return entries, recording.damage


def named_in(damage: tuple[str, ...]) -> set[tuple[str, int]]:
    """The stream and sequence of every entry that the sentences name."""
    found: set[tuple[str, int]] = set()
    stream = ""
    for sentence in damage:
        for name, first, last in re.findall(r"([a-z]+ )?([\d,]+) to ([\d,]+)", sentence):
            stream = name.strip() or stream  # "rollouts 1 to 3, 7 to 9 are missing"
            found |= {(stream, seq) for seq in range(int(first.replace(",", "")), int(last.replace(",", "")) + 1)}
        if lost := re.fullmatch(r"[\d,]+ of [\d,]+ (partials) are missing", sentence):
            found |= {(lost[1], seq) for seq in range(1, 1000)}
    return found
