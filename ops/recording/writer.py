"""Writing a recording: one pass, blocks as they fill, memory bounded by one block and the headers of all."""

from __future__ import annotations

import dataclasses
import time
from importlib.metadata import version
from typing import BinaryIO

from bus.port import Entry, StreamInfo
from ops.recording.cut import Cut
from ops.recording.format import (
    BLOCK_ENTRIES_MAX,
    BLOCK_TARGET_BYTES,
    ENTRIES,
    FILE,
    INDEX,
    INDEX_BLOCKS_MAX,
    META,
    Block,
    Meta,
    Trailer,
    digest_of,
    digest_of_all,
    pack_entries,
    pack_head,
    pack_index,
    pack_payload,
    pack_piece,
)

FILE_PIECE_BYTES = 1 << 20


class RecordingWriter:
    """Writes a recording into `file`, from its beginning. Blocks: call it beside the event loop.

    `add_file` the files of the initial model, `add` the entries stream by stream and in order, then `finish`.
    """

    def __init__(self, file: BinaryIO, run: str, recipe_yaml: str, cut: Cut, files: dict[str, int]) -> None:
        self.nbytes = 0
        self.entries = 0
        self._file = file
        self._meta = Meta(run, recipe_yaml, version("rollstream"), time.time(), cut, files)
        self._streams = dict(cut.streams)  # as they turn out: of a stream that keeps the newest only, less may be left
        self._written = dict.fromkeys(cut.streams, 0)
        self._head = pack_head()
        self._places: list[tuple[int, Block]] = []
        self._waiting: list[Entry] = []
        self._waiting_bytes = 0
        self._write(self._head)
        self._put_meta()

    def add_file(self, path: str, content: BinaryIO) -> None:
        """A file of the initial model, under its path relative to the model's folder."""
        at = 0
        while piece := content.read(FILE_PIECE_BYTES):
            self._put(FILE, pack_piece(path, at, piece), at, at + len(piece), 1, "initial")
            at += len(piece)

    def add(self, entry: Entry) -> bool:
        """Take the next entry; True if `flush` is due, which is what writes."""
        waiting = self._waiting
        if waiting and waiting[0].stream is not entry.stream:
            self.flush()
            waiting = self._waiting
        waiting.append(entry)
        self._waiting_bytes += len(entry.data) + sum(map(len, entry.headers.values()))
        return self._waiting_bytes >= BLOCK_TARGET_BYTES or len(waiting) >= BLOCK_ENTRIES_MAX

    def flush(self) -> None:
        """Write the entries taken so far as a block."""
        entries, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not entries:
            return
        name = entries[0].stream.name
        self._put(ENTRIES, pack_entries(entries), entries[0].seq, entries[-1].seq, len(entries), name)
        self.entries += len(entries)
        self._written[name] += len(entries)

    def finish(self) -> bytes:
        """Write the index and the trailer; returns the digest of the whole, 32 bytes."""
        self.flush()
        for name, count in self._written.items():
            info = self._streams[name]
            self._streams[name] = StreamInfo(info.first_seq, info.last_seq, count, info.nbytes)
        self._meta = dataclasses.replace(self._meta, cut=dataclasses.replace(self._meta.cut, streams=self._streams))
        self._put_meta()
        places, index_at = list(self._places), self.nbytes
        digest = digest_of_all(self._head, [block for _, block in places])
        parts = [places[i : i + INDEX_BLOCKS_MAX] for i in range(0, len(places), INDEX_BLOCKS_MAX)]
        for part in parts:
            self._put(INDEX, pack_index(part), 0, 0, len(part), "")
        self._write(Trailer(index_at, len(places), len(parts), digest).packed())
        return digest

    def _put_meta(self) -> None:
        """At the front, so that a file that was cut tells what it lacks; and at the end, with what was found."""
        self._put(META, self._meta.packed(), 0, 0, 1, "")

    def _put(self, kind: int, raw: bytes, first: int, last: int, count: int, name: str) -> None:
        codec, stored = pack_payload(raw)
        block = Block(
            kind, codec, len(self._places), count, len(stored), len(raw), first, last, name, digest_of(stored)
        )
        self._places.append((self.nbytes, block))
        self._write(block.packed())
        self._write(stored)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.nbytes += len(data)
