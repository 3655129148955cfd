"""Reading a recording as a log: by stream and range, without unpacking the rest, past whatever is damaged."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import os
import shutil
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from bus.port import RUN_HEADER, Entry, StreamInfo
from bus.table import CONTROL, STREAMS, Stream
from ops.recording.cut import CUT_ORDER, Cut
from ops.recording.directory import Directory, directory_of, read_block
from ops.recording.format import (
    ENTRIES,
    FILE,
    FORMAT,
    HEAD,
    META,
    Block,
    Damaged,
    Meta,
    unpack_entries,
    unpack_head,
    unpack_meta,
    unpack_piece,
)
from schemas import Control, MalformedMessage, UserError

BLOCKS_KEPT: Final = 16  # unpacked, for `get`: the samples of a batch stand close to each other
GAPS_SHOWN: Final = 8
_NEWEST_ONLY: Final = {stream.name for stream in STREAMS if stream.newest_only}


@contextlib.contextmanager
def open_recording(path: Path) -> Iterator[Recording]:
    """The recording in a file, to be read as a log.

    Raises:
        UserError: the file cannot be read, is no recording, or is of a format that this program does not know.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", "Name a recording that can.") from None
    try:
        size = os.fstat(file).st_size
        if not size:
            raise UserError(f"{path} is empty.", "Make the recording again: rollstream record")
        version = unpack_head(os.pread(file, HEAD.size, 0))
        reader = READERS.get(FORMAT if version is None else version)  # a damaged head is told as damage
        if reader is None:
            known = f"{min(READERS)} to {max(READERS)}" if len(READERS) > 1 else f"{FORMAT}"
            raise UserError(
                f"{path} was written in recording format {version}; this Rollstream reads {known}.",
                "Upgrade Rollstream: pip install --upgrade rollstream",
            )
        yield reader(file, path)
    finally:
        os.close(file)


class Recording:
    """The log in a recording of format 1; see `ops.log_source.LogSource`."""

    def __init__(self, file: int, path: Path) -> None:
        self._file = file
        self._path = path
        self._directory: Directory = directory_of(file)
        self._damage = dict.fromkeys(self._directory.damage)  # in order, each once
        self._kept: OrderedDict[int, list[Entry]] = OrderedDict()
        if not self._directory.places:
            raise UserError(
                f"{path} is no recording of Rollstream, or nothing of it is left.", "Name a file that `record` wrote."
            )
        self._blocks: dict[str, list[tuple[int, Block]]] = defaultdict(list)
        for at, block in self._directory.places:
            if block.kind == ENTRIES:
                self._blocks[block.name].append((at, block))
        self.meta = self._found_meta() or self._guessed_meta()
        self.run, self.recipe_yaml = self.meta.run, self.meta.recipe_yaml
        if self._directory.damage:
            self._name_gaps()

    @property
    def damage(self) -> tuple[str, ...]:
        """What is wrong with it, as far as it was read."""
        return tuple(self._damage)

    @property
    def digest(self) -> bytes:
        """The digest of the whole, 32 bytes; empty if its structure is damaged."""
        return self._directory.digest

    async def cut(self) -> Cut:
        """Where the log was cut when it was recorded."""
        return self.meta.cut

    async def info(self, stream: Stream) -> StreamInfo:
        """What the recording holds of a stream."""
        blocks = [block for _, block in self._blocks.get(stream.name, [])]
        if not blocks:
            last = self.meta.cut.streams.get(stream.name, StreamInfo(1, 0, 0, 0)).last_seq
            return StreamInfo(last + 1, last, 0, 0)
        count, nbytes = sum(block.count for block in blocks), sum(block.raw for block in blocks)
        return StreamInfo(blocks[0].first, blocks[-1].last, count, nbytes)

    async def read(self, stream: Stream, start: int = 1, stop: int | None = None) -> AsyncGenerator[Entry, None]:
        """The entries with `start <= seq < stop`, in order; damaged blocks are left out and told in `damage`."""
        end = 1 << 62 if stop is None else stop
        newest = start - 1
        for at, block in self._blocks.get(stream.name, []):
            if block.last < start or block.first >= end:
                continue
            for entry in await asyncio.to_thread(self._entries, stream, at, block):
                if newest < entry.seq < end:
                    newest = entry.seq
                    yield entry

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        """The entries at these sequences, in this order. Raises `LookupError` if one is not there."""
        return await asyncio.to_thread(lambda: [self._entry(stream, seq) for seq in seqs])

    def check_files(self) -> None:
        """Read everything that is not the log, so that `damage` tells of it too."""
        for at, block in self._directory.places:
            if block.kind != ENTRIES:
                self._payload(at, block)

    def extract_model(self, folder: Path) -> Path:
        """Write the initial model into `folder`, and return that.

        Raises:
            UserError: the recording holds none, or not all of it, or the folder cannot be written.
        """
        if not self.meta.files:
            raise UserError(
                f"{self._path} holds no initial model.", "It was made with --no-model; record the run again without."
            )
        aside = folder.with_name(f".{folder.name}-{os.getpid()}")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            self._extract(aside)
            if folder.exists():
                shutil.rmtree(folder)
            aside.rename(folder)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}.", "Free some space there.") from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return folder

    def _extract(self, folder: Path) -> None:
        written = dict.fromkeys(self.meta.files, 0)
        for at, block in self._directory.places:
            if block.kind != FILE or (raw := self._payload(at, block)) is None:
                continue
            try:
                path, place, piece = unpack_piece(raw)
            except Damaged as damaged:
                self._note(f"{block.shown()} is damaged: {damaged}")
                continue
            if place == written.get(path) and place + len(piece) <= self.meta.files[path]:
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("ab") as file:
                    file.write(piece)
                written[path] += len(piece)
        broken = [path for path, nbytes in self.meta.files.items() if nbytes != written[path]]
        if broken:
            raise UserError(
                f"The initial model in {self._path} is damaged: {', '.join(broken)} cannot be read whole.",
                "Record the run again.",
            )

    # ---- blocks

    def _payload(self, at: int, block: Block) -> bytes | None:
        try:
            raw, header_whole = read_block(self._file, at, block)
        except Damaged as damaged:
            self._note(f"{block.shown()} is damaged: {damaged}")
            return None
        if not header_whole:
            self._note(f"the header of {block.shown()} is damaged; what it holds was read")
        return raw

    def _entries(self, stream: Stream, at: int, block: Block) -> list[Entry]:
        raw = self._payload(at, block)
        try:
            return unpack_entries(stream, block, raw) if raw is not None else []
        except Damaged as damaged:
            self._note(f"{block.shown()} is damaged: {damaged}")
            return []

    def _entry(self, stream: Stream, seq: int) -> Entry:
        blocks = self._blocks.get(stream.name, [])
        i = bisect.bisect_right(blocks, seq, key=lambda place: place[1].first) - 1
        if i >= 0 and seq <= blocks[i][1].last:
            at, block = blocks[i]
            entries = self._kept.pop(at, None)
            if entries is None:
                entries = self._entries(stream, at, block)
            self._kept[at] = entries
            if len(self._kept) > BLOCKS_KEPT:
                self._kept.popitem(last=False)
            found = bisect.bisect_left(entries, seq, key=lambda entry: entry.seq)
            if found < len(entries) and entries[found].seq == seq:
                return entries[found]
        raise LookupError(f"{stream.name} of run {self.run} holds nothing at sequence {seq}")

    def _note(self, sentence: str) -> None:
        self._damage[sentence] = None

    # ---- what the whole is

    def _found_meta(self) -> Meta | None:
        """The description: the later one, which says how much was written, if it is whole."""
        for at, block in reversed(self._directory.places):
            if block.kind == META and (raw := self._payload(at, block)) is not None:
                try:
                    return unpack_meta(raw)
                except Damaged as damaged:
                    self._note(f"{block.shown()} is damaged: {damaged}")
        return None

    def _guessed_meta(self) -> Meta:
        """What the entries themselves tell, where no description is left."""
        self._note("its description is lost: what is missing at the ends of its streams cannot be told")
        infos = {stream.name: StreamInfo(1, 0, 0, 0) for stream in CUT_ORDER}
        run = recipe = ""
        for name, blocks in self._blocks.items():
            if name in infos:
                infos[name] = StreamInfo(1, blocks[-1][1].last, sum(block.count for _, block in blocks), 0)
        for name, blocks in self._blocks.items():
            for at, block in blocks if name == CONTROL.name else blocks[:1]:
                for entry in self._entries(Stream(name), at, block):
                    run = run or entry.headers.get(RUN_HEADER, "")
                    recipe = _recipe_in(entry) or recipe if name == CONTROL.name else recipe
        return Meta(run, recipe, "", 0.0, Cut(infos["prompts"].last_seq, infos), {})

    def _name_gaps(self) -> None:
        """Say which sequences are in no block that was found."""
        for name, info in self.meta.cut.streams.items():
            blocks = [block for _, block in self._blocks.get(name, [])]
            gaps, next_seq = [], info.first_seq
            for block in blocks:
                if block.first > next_seq:
                    gaps.append((next_seq, block.first - 1))
                next_seq = max(next_seq, block.last + 1)
            if info.messages and next_seq <= info.last_seq:
                gaps.append((next_seq, info.last_seq))
            have = sum(block.count for block in blocks)
            if name in _NEWEST_ONLY:  # gaps are its nature; only the count tells
                if have < info.messages:
                    self._note(f"{info.messages - have:,} of {info.messages:,} {name} are missing")
            elif gaps:
                shown = ", ".join(f"{first:,} to {last:,}" for first, last in gaps[:GAPS_SHOWN])
                more = f" and {len(gaps) - GAPS_SHOWN} more gaps" if len(gaps) > GAPS_SHOWN else ""
                self._note(f"{name} {shown}{more} are missing")


READERS: Final[dict[int, Callable[[int, Path], Recording]]] = {1: Recording}


def _recipe_in(entry: Entry) -> str:
    try:
        message = entry.message()
    except MalformedMessage:
        return ""
    return message.recipe if isinstance(message, Control) and message.action == "start" else ""
