"""The bytes of a recording, format 1: a head, blocks one after another, an index, a trailer.

    head      MAGIC, format version, crc32
    block     a header of 80 bytes, then its payload: entries of one stream, or a piece of a file, or what the whole is
    ...
    index     blocks that repeat the header of every block before them, with its place
    trailer   where the index is, and a digest over all headers, which hold the digests of their payloads

A block needs nothing but itself to be read, and says itself what it should hold. So from a damaged file everything but
the damaged blocks is read, and of these it is known what they held. All integers are little-endian.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise, repeat
from pathlib import PurePosixPath
from typing import Any, Final

import msgpack

from bus.port import Entry, StreamInfo
from bus.table import Stream
from ops.recording.cut import Cut

SUFFIX: Final = ".rollstream"
MAGIC: Final = b"\x89ROLLSTREAM\n"  # not text, and changed by whatever changes line ends
FORMAT: Final = 1
HEAD: Final = struct.Struct("<12sII")
_HEAD_SUMMED: Final = struct.Struct("<12sI")

SYNC: Final = b"\xf5\x00RSB1\r\n"  # every block begins with it, so that blocks are found behind a damaged one
_BLOCK: Final = struct.Struct("<8sBBHIIIIQQ16s16s")
_CRC: Final = struct.Struct("<I")
BLOCK_BYTES: Final = _BLOCK.size + _CRC.size

TRAILER_SYNC: Final = b"\xf5\x00RSE1\r\n"
_TRAILER: Final = struct.Struct("<8sQII32s")
TRAILER_BYTES: Final = _TRAILER.size + _CRC.size
_PLACE: Final = struct.Struct("<Q")

META, ENTRIES, FILE, INDEX = 1, 2, 3, 4
RAW, ZLIB = 0, 1
ZLIB_LEVEL: Final = 1

BLOCK_TARGET_BYTES: Final = 256 << 10  # a damaged byte costs one block
BLOCK_ENTRIES_MAX: Final = 4096
BLOCK_RAW_MAX: Final = 16 << 20  # above the largest message with its headers; nothing larger is ever allocated
INDEX_BLOCKS_MAX: Final = 1 << 16  # headers in one index block
META_ITEMS_MAX: Final = 4096


class Damaged(Exception):
    """Bytes of a recording that are not those that were written. The argument says what is wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A block's header. `number` counts from 0; `count` entries of the stream `name` from `first` to `last`.

    `digest` is the blake2b of the payload's `stored` bytes, which unpack to `raw` bytes.
    """

    kind: int
    codec: int
    number: int
    count: int
    stored: int
    raw: int
    first: int
    last: int
    name: str
    digest: bytes

    def packed(self) -> bytes:
        """The header's 80 bytes."""
        packed = _BLOCK.pack(
            SYNC, self.kind, self.codec, 0, self.number, self.count, self.stored, self.raw, self.first, self.last,
            self.name.encode(), self.digest,
        )  # fmt: skip
        return packed + _CRC.pack(zlib.crc32(packed))

    def shown(self) -> str:
        """What it holds, for people: `block 7 (rollouts 1,001 to 2,024)`."""
        what = {META: "the description", FILE: "a piece of the initial model", INDEX: "index"}.get(self.kind)
        return f"block {self.number:,} ({what or f'{self.name} {self.first:,} to {self.last:,}'})"


def unpack_block(header: bytes) -> Block | None:
    """The block that has this header, None if the bytes are none."""
    if len(header) != BLOCK_BYTES or not header.startswith(SYNC):
        return None
    if zlib.crc32(header[: _BLOCK.size]) != _CRC.unpack_from(header, _BLOCK.size)[0]:
        return None
    _, kind, codec, _, number, count, stored, raw, first, last, name, digest = _BLOCK.unpack_from(header)
    if max(stored, raw) > BLOCK_RAW_MAX or kind not in (META, ENTRIES, FILE, INDEX) or codec not in (RAW, ZLIB):
        return None
    return Block(kind, codec, number, count, stored, raw, first, last, _ascii(name), digest)


def _ascii(name: bytes) -> str:
    return name.rstrip(b"\0").decode("ascii", "replace")


def pack_head(version: int = FORMAT) -> bytes:
    """The first bytes of a recording."""
    return HEAD.pack(MAGIC, version, zlib.crc32(_HEAD_SUMMED.pack(MAGIC, version)))


def unpack_head(head: bytes) -> int | None:
    """The format version that the first bytes name, None if they are not whole. The same in every format."""
    if len(head) != HEAD.size:
        return None
    magic, version, crc = HEAD.unpack(head)
    return int(version) if magic == MAGIC and crc == zlib.crc32(head[: _HEAD_SUMMED.size]) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Trailer:
    """The last bytes: where the index begins, how many blocks are before it and in it, and the digest of the whole."""

    index_at: int
    blocks: int
    index_blocks: int
    digest: bytes

    def packed(self) -> bytes:
        """Its bytes."""
        packed = _TRAILER.pack(TRAILER_SYNC, self.index_at, self.blocks, self.index_blocks, self.digest)
        return packed + _CRC.pack(zlib.crc32(packed))


def unpack_trailer(packed: bytes) -> Trailer | None:
    """The trailer in the last bytes of a file, None if there is none."""
    if len(packed) != TRAILER_BYTES or not packed.startswith(TRAILER_SYNC):
        return None
    if zlib.crc32(packed[: _TRAILER.size]) != _CRC.unpack_from(packed, _TRAILER.size)[0]:
        return None
    return Trailer(*_TRAILER.unpack_from(packed)[1:])


def digest_of(payload: bytes) -> bytes:
    """The digest that a block's header holds of its payload, 16 bytes."""
    return hashlib.blake2b(payload, digest_size=16).digest()


def pack_payload(raw: bytes) -> tuple[int, bytes]:
    """The codec and the bytes as stored: compressed where that is worth the time to unpack."""
    packed = zlib.compress(raw, ZLIB_LEVEL)
    return (ZLIB, packed) if len(packed) < len(raw) - len(raw) // 8 else (RAW, raw)


def unpack_payload(block: Block, stored: bytes) -> bytes:
    """The payload of a block. Raises `Damaged`; never allocates more than the header allows."""
    if len(stored) != block.stored:
        raise Damaged(f"it is cut off after {len(stored):,} of {block.stored:,} bytes")
    if digest_of(stored) != block.digest:
        raise Damaged("its bytes are not those that were written")
    if block.codec == RAW and block.raw == block.stored:
        return stored
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(stored, block.raw + 1)
    except zlib.error as error:
        raise Damaged(f"it does not unpack: {error}") from None
    if len(raw) != block.raw or not unpacker.eof:
        raise Damaged(f"it does not unpack to the {block.raw:,} bytes that it names")
    return raw


def pack_entries(entries: Sequence[Entry]) -> bytes:
    """Entries of one stream, column by column."""
    count = len(entries)
    packed: bytes = msgpack.packb(
        [
            struct.pack(f"<{count}q", *[entry.seq for entry in entries]),
            struct.pack(f"<{count}d", *[entry.time_s for entry in entries]),
            [entry.key for entry in entries] if any(entry.key for entry in entries) else None,
            [dict(entry.headers) for entry in entries],
            [entry.data for entry in entries],
        ]
    )
    return packed


def unpack_entries(stream: Stream, block: Block, raw: bytes) -> list[Entry]:
    """The entries of a block, in order. Raises `Damaged`."""
    try:
        packed_seqs, packed_times, keys, headers, datas = msgpack.unpackb(
            raw, max_array_len=BLOCK_ENTRIES_MAX, max_map_len=BLOCK_ENTRIES_MAX
        )
        seqs = struct.unpack(f"<{block.count}q", packed_seqs)
        times = struct.unpack(f"<{block.count}d", packed_times)
        keys = [""] * block.count if keys is None else keys
        if {block.count} != {len(keys), len(headers), len(datas)}:
            raise Damaged("its columns differ in length")
        _all_of(str, keys)
        _all_of(bytes, datas)
        _all_of(dict, headers)
        _all_of(str, chain.from_iterable(header.values() for header in headers))
        entries = list(map(Entry, repeat(stream), seqs, keys, headers, datas, times))
    except Exception as error:  # msgpack raises a dozen kinds
        raise Damaged(f"it holds no entries: {type(error).__name__} {error}") from None
    rising = all(one < other for one, other in pairwise(seqs))
    if not seqs or not rising or (seqs[0], seqs[-1]) != (block.first, block.last):
        raise Damaged("its entries are not those that its header names")
    return entries


def _all_of(kind: type, items: Iterable[Any]) -> None:
    if not set(map(type, items)) <= {kind}:
        raise Damaged(f"a column does not hold {kind.__name__} only")


def pack_piece(path: str, place: int, piece: bytes) -> bytes:
    """A piece of a file of the initial model, as a block's payload; `path` is relative to the model's folder."""
    packed: bytes = msgpack.packb([path, place, piece])
    return packed


def unpack_piece(raw: bytes) -> tuple[str, int, bytes]:
    """Path, place and bytes of a piece. Raises `Damaged`, also for a path that leads out of the folder."""
    try:
        path, place, piece = msgpack.unpackb(raw)
    except Exception as error:  # msgpack raises a dozen kinds
        raise Damaged(f"it holds no piece of a file: {type(error).__name__} {error}") from None
    if type(path) is not str or type(place) is not int or type(piece) is not bytes:
        raise Damaged("it holds no piece of a file")
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\\" in path or "\0" in path:
        raise Damaged(f"its path {path!r} leads out of the folder")
    return path, place, piece


@dataclasses.dataclass(frozen=True, slots=True)
class Meta:
    """What a recording is. `files` are those of the initial model: relative path -> bytes; empty if left out.

    `rollstream` is the version of the program that made it, `made_s` the Unix time.
    """

    run: str
    recipe_yaml: str
    rollstream: str
    made_s: float
    cut: Cut
    files: dict[str, int]

    def packed(self) -> bytes:
        """As a block's payload."""
        fields = dataclasses.asdict(self)
        fields["cut"] = [self.cut.gated_seq, {n: dataclasses.astuple(i) for n, i in self.cut.streams.items()}]
        packed: bytes = msgpack.packb(fields)
        return packed


def unpack_meta(raw: bytes) -> Meta:
    """The description in a block's payload. Raises `Damaged`."""
    try:
        fields: dict[str, Any] = msgpack.unpackb(raw, max_array_len=META_ITEMS_MAX, max_map_len=META_ITEMS_MAX)
        gated_seq, streams = fields["cut"]
        cut = Cut(int(gated_seq), {str(name): StreamInfo(*map(int, info)) for name, info in streams.items()})
        return Meta(
            run=str(fields["run"]),
            recipe_yaml=str(fields["recipe_yaml"]),
            rollstream=str(fields["rollstream"]),
            made_s=float(fields["made_s"]),
            cut=cut,
            files={str(path): int(size) for path, size in fields["files"].items()},
        )
    except Exception as error:  # msgpack raises a dozen kinds
        raise Damaged(f"it holds no description: {type(error).__name__} {error}") from None


def pack_index(places: Sequence[tuple[int, Block]]) -> bytes:
    """Places and headers of blocks."""
    return b"".join(_PLACE.pack(at) + block.packed() for at, block in places)


def unpack_index(raw: bytes) -> list[tuple[int, Block]]:
    """The places and headers in an index block. Raises `Damaged`."""
    size = _PLACE.size + BLOCK_BYTES
    places = []
    for at in range(0, len(raw), size):
        block = unpack_block(raw[at + _PLACE.size : at + size])
        if block is None:
            raise Damaged("it holds no index")
        places.append((_PLACE.unpack_from(raw, at)[0], block))
    return places


def digest_of_all(head: bytes, blocks: Sequence[Block]) -> bytes:
    """The digest of a recording, 32 bytes: over its head and all headers, which hold the digests of the payloads."""
    digest = hashlib.blake2b(head, digest_size=32)
    for block in blocks:
        digest.update(block.packed())
    return digest.digest()
