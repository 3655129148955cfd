"""Reading log entries without building their messages: ten times as fast, for who reads all of a large log."""

from __future__ import annotations

import hashlib
import struct
from typing import Any, Final

import msgpack

from bus.port import Entry
from schemas import MalformedMessage, Segments, sample_id
from schemas.upcast import to_current

INDEX_BITS: Final = 20  # a sample's index is below 2**20


def fields_of(entry: Entry) -> dict[str, Any]:
    """The packed fields of an entry, in the current version of its type, without the checks that building it costs.

    Raises:
        MalformedMessage: it is no envelope, or of a newer program.
    """
    try:
        name, version, fields = msgpack.unpackb(entry.data)
    except Exception as error:  # msgpack raises a dozen kinds
        raise MalformedMessage(f"{type(error).__name__} {error}") from None
    return to_current(name, version, fields)[1]


def segments_in(packed: bytes) -> Segments:
    """The `(version, count)` pairs in a packed field, neighbours of one version joined."""
    out: list[tuple[int, int]] = []
    for version, count in struct.iter_unpack("<ii", packed):
        if out and out[-1][0] == version:
            out[-1] = version, out[-1][1] + count
        else:
            out.append((version, count))
    return tuple(out)


def first_tokens(segments: Segments, count: int) -> Segments:
    """The segments of the first `count` tokens: `first_tokens(((3, 5), (4, 2)), 6) == ((3, 5), (4, 1))`."""
    out = []
    for version, length in segments:
        if count <= 0:
            break
        out.append((version, min(length, count)))
        count -= length
    return tuple(out)


def prefix_digest(tokens: bytes, logprobs: bytes, segments: Segments, count: int) -> bytes:
    """A digest over the first `count` tokens, their logprobs and their version tags."""
    digest = hashlib.blake2b(tokens[: 4 * count], digest_size=16)
    digest.update(logprobs[: 4 * count])
    digest.update(repr(first_tokens(segments, count)).encode())
    return digest.digest()


def sample_key(sample: tuple[int, int]) -> int:
    """`(group_id, index)` as one integer, of which millions fit into memory."""
    return sample[0] << INDEX_BITS | sample[1]


def group_of(key: int) -> int:
    """The group id in a key."""
    return key >> INDEX_BITS


def named(key: int) -> str:
    """The sample id of a key."""
    return sample_id(key >> INDEX_BITS, key & ((1 << INDEX_BITS) - 1))
