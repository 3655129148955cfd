"""Finding the blocks of a recording: by its index, or, where that is damaged, by looking for them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Final

from ops.recording.format import (
    BLOCK_BYTES,
    BLOCK_RAW_MAX,
    HEAD,
    INDEX,
    SYNC,
    TRAILER_BYTES,
    Block,
    Damaged,
    digest_of_all,
    pack_head,
    unpack_block,
    unpack_index,
    unpack_payload,
    unpack_trailer,
)

SEARCH_BYTES: Final = 1 << 20  # read at a time, looking for the next block
FIRST_WITHIN_BYTES: Final = 4 * BLOCK_RAW_MAX  # a file without a block in so many bytes is no recording


@dataclasses.dataclass(frozen=True, slots=True)
class Directory:
    """The blocks of a recording with their places, in order, and what is wrong with the file's structure.

    `digest` is that of the whole, 32 bytes; empty if the structure is damaged.
    """

    places: Sequence[tuple[int, Block]]
    damage: tuple[str, ...]
    digest: bytes


def directory_of(file: int) -> Directory:
    """The directory of the recording in an open file. Its places are empty if the file holds no block at all."""
    size = os.fstat(file).st_size
    try:
        return _indexed(file, size)
    except Damaged as damaged:
        places, found = _searched(file, size)
        return Directory(places, (str(damaged), *found), b"")


def read_block(file: int, at: int, block: Block) -> tuple[bytes, bool]:
    """The payload of a block, and whether its header in the file is whole too. Raises `Damaged`."""
    packed = _bytes_at(file, BLOCK_BYTES + block.stored, at)
    return unpack_payload(block, packed[BLOCK_BYTES:]), packed[:BLOCK_BYTES] == block.packed()


def _bytes_at(file: int, count: int, at: int) -> bytes:
    """Up to `count` bytes; fewer at the end of the file, none where the disk cannot read them."""
    try:
        return os.pread(file, count, at)
    except OSError:
        return b""


def _indexed(file: int, size: int) -> Directory:
    trailer = unpack_trailer(_bytes_at(file, TRAILER_BYTES, max(0, size - TRAILER_BYTES)))
    if trailer is None:
        raise Damaged("the file does not end as a recording does: it was cut off, added to, or changed there")
    places, at = [], trailer.index_at
    for _ in range(trailer.index_blocks):
        block = unpack_block(_bytes_at(file, BLOCK_BYTES, at))
        if block is None or block.kind != INDEX:
            raise Damaged("the index is damaged")
        places += unpack_index(_payload(file, at, block))
        at += BLOCK_BYTES + block.stored
    head = pack_head()
    digest = digest_of_all(head, [block for _, block in places])
    if at + TRAILER_BYTES != size or len(places) != trailer.blocks or digest != trailer.digest:
        raise Damaged("the index does not fit the file")
    damage = () if _bytes_at(file, HEAD.size, 0) == head else ("the first bytes of the file are damaged",)
    return Directory(places, damage, digest)


def _payload(file: int, at: int, block: Block) -> bytes:
    try:
        return read_block(file, at, block)[0]
    except Damaged as damaged:
        raise Damaged(f"the index is damaged: {damaged}") from None


def _searched(file: int, size: int) -> tuple[list[tuple[int, Block]], list[str]]:
    """All blocks whose headers are whole, except the index, and what lies between them."""
    places: list[tuple[int, Block]] = []
    damage: list[str] = []
    at = HEAD.size
    while at < size:
        block = unpack_block(_bytes_at(file, BLOCK_BYTES, at))
        if block is not None and at + BLOCK_BYTES + block.stored <= size:
            if block.kind != INDEX:
                places.append((at, block))
            at += BLOCK_BYTES + block.stored
            continue
        if block is not None:
            damage.append(f"{block.shown()} is cut off by the end of the file")
            after = size
        elif unpack_trailer(_bytes_at(file, TRAILER_BYTES, at)) is not None:
            at += TRAILER_BYTES
            continue
        else:
            limit = size if places else min(size, FIRST_WITHIN_BYTES)
            after = next(_syncs(file, at + 1, limit), size)
            damage.append(f"bytes {at:,} to {after - 1:,} are damaged or no part of it")
        at = after
    return places, damage


def _syncs(file: int, start: int, stop: int) -> Iterator[int]:
    """The places of whole block headers in a part of the file, in order."""
    at = start
    while at < stop:
        chunk = _bytes_at(file, SEARCH_BYTES + len(SYNC), at)
        found = chunk.find(SYNC)
        while 0 <= found < SEARCH_BYTES:
            if unpack_block(_bytes_at(file, BLOCK_BYTES, at + found)) is not None:
                yield at + found
            found = chunk.find(SYNC, found + 1)
        at += SEARCH_BYTES
