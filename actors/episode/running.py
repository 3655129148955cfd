"""Which episodes of a worker run, and which of them the processor is at: written where the worker's death leaves it.

A function of the user's may end its process: `os._exit`, a crash of compiled code, too much memory. Then nothing in the
process can tell which episode did it. So it is noted beforehand, at each step of each episode, in memory that is mapped
to a file: what stands there when the process dies stays, for the next worker of that name to read.

    head   int32 slot that the processor is at, -1 if none; int32 slots; 500 bytes of last words
    slots  int64 group, -1 if the slot is free; int32 index
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import struct
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any, Generic, TypeVar

from schemas import Prompt, sample_id

T = TypeVar("T")

_HEAD = struct.Struct("<ii500s")
_AT = struct.Struct("<i")
_SLOT = struct.Struct("<qi")
WORDS_BYTES_MAX = 500
NOBODY = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Fallen:
    """What a worker that died has left: the samples whose episodes ran, the one it was at, and its last words."""

    running: tuple[str, ...]
    at: str | None
    words: str

    @property
    def culprit(self) -> str | None:
        """Whose episode ended the process; None if several may have."""
        return self.at or (self.running[0] if len(self.running) == 1 else None)


class Running:
    """The record of one worker with room for so many episodes. In memory only, without a path or on a full disk."""

    def __init__(self, path: Path | None, slots: int) -> None:
        self._path = path
        self._memory = _mapped(path, _HEAD.size + slots * _SLOT.size)
        self._free = list(reversed(range(slots)))
        _HEAD.pack_into(self._memory, 0, NOBODY, slots, b"")
        for slot in range(slots):
            _SLOT.pack_into(self._memory, self._offset(slot), NOBODY, 0)

    @contextlib.contextmanager
    def episode(self, prompt: Prompt) -> Generator[int, None, None]:
        """The slot of an episode, as long as it runs."""
        slot = self._free.pop()
        _SLOT.pack_into(self._memory, self._offset(slot), prompt.group_id, prompt.index)
        try:
            yield slot
        finally:
            _SLOT.pack_into(self._memory, self._offset(slot), NOBODY, 0)
            self._free.append(slot)

    def at(self, slot: int) -> None:
        """From now on the processor is at the episode of a slot, or at `NOBODY`'s."""
        _AT.pack_into(self._memory, 0, slot)

    @property
    def now(self) -> str | None:
        """The sample that the processor is at. May be asked from any thread."""
        return _read(bytes(self._memory)).at

    def say(self, words: str) -> None:
        """Leave words behind, why the process ends."""
        self._memory[8 : _HEAD.size] = words.encode()[:WORDS_BYTES_MAX].ljust(WORDS_BYTES_MAX, b"\0")

    def close(self) -> None:
        """The worker ends in order: it leaves nothing. Episodes that still clean up are noted as before, for nobody."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @staticmethod
    def _offset(slot: int) -> int:
        return _HEAD.size + slot * _SLOT.size


def _mapped(path: Path | None, size: int) -> mmap.mmap:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, size)  # or a write to a full disk would kill us
                return mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
    return mmap.mmap(-1, size)


def left_by(path: Path) -> Fallen | None:
    """What the worker that wrote there last has left; None if it ended in order, or before it began."""
    try:
        return _read(path.read_bytes())
    except (OSError, struct.error):
        return None


def _read(record: bytes) -> Fallen:
    at, slots, words = _HEAD.unpack_from(record)
    samples = [_SLOT.unpack_from(record, _HEAD.size + slot * _SLOT.size) for slot in range(slots)]
    names = [sample_id(group, index) if group != NOBODY else None for group, index in samples]
    return Fallen(
        tuple(name for name in names if name is not None),
        names[at] if 0 <= at < slots else None,
        words.rstrip(b"\0").decode(errors="replace"),
    )


class Marked(Generic[T]):
    """A coroutine that marks its slot whenever it is at work: awaited in its place."""

    def __init__(self, running: Running, slot: int, work: Coroutine[Any, Any, T]) -> None:
        self._running = running
        self._slot = slot
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        work, running, slot = self._work, self._running, self._slot
        send, value = work.send, None
        while True:
            running.at(slot)
            try:
                waits_for = send(value)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                running.at(NOBODY)
            try:
                send, value = work.send, (yield waits_for)
            except BaseException as error:
                send, value = work.throw, error
