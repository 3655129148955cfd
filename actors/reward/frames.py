"""Frames between a reward pool and its child: four bytes of big-endian length, then one msgpack value.

Standard library and msgpack only: the child imports this, and must start fast.
"""

import struct
from typing import Any, BinaryIO

import msgpack

HEADER = struct.Struct(">I")
REQUEST_BYTES_MAX = 64 << 20
DETAIL_CHARS_MAX = 400
TOKENS_MAX = 1 << 20  # that a reply may reward
STEPS_MAX = 4096
REPLY_BYTES_MAX = (64 << 10) + 4 * TOKENS_MAX  # a few numbers and process rewards; it must not fill the parent's memory


def pack(value: Any) -> bytes:
    """The body of a frame. Raises `TypeError`, `ValueError` or `OverflowError` if msgpack cannot say `value`."""
    body: bytes = msgpack.packb(value, unicode_errors="surrogatepass")  # decoded text may hold lone surrogates
    return body


def unpack(body: bytes) -> Any:
    """The value of a frame's body. Raises `ValueError` if it is none."""
    try:
        return msgpack.unpackb(body, unicode_errors="surrogatepass")
    except ValueError:
        raise
    except Exception as error:  # msgpack's own exceptions share no base but Exception
        raise ValueError(f"{type(error).__name__}: {error}") from error


def frame(body: bytes) -> bytes:
    """`body` with its length before it, ready to be written."""
    return HEADER.pack(len(body)) + body


def read_frame(stream: BinaryIO, bytes_max: int) -> bytes | None:
    """The next body; None if the stream ended. Raises `ValueError` for one longer than `bytes_max`."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    if length > bytes_max:
        raise ValueError(f"a frame of {length} bytes exceeds the limit of {bytes_max}")
    body = stream.read(length)
    return body if len(body) == length else None
