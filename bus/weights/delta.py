"""What changed between two versions of weights, without loss: where, and by how much.

At the learning rates of RL about 99 % of bfloat16 weights keep their bits in a step, and most of the others move to
the neighbouring number. So a delta says, of every changed element, how many unchanged ones lie before it, and the
difference of both bit patterns as integers. What is a NaN, or a -0.0, is a bit pattern like any other.

```
"RSDELTA1", length of the header (uint32), header (JSON), payload
header   {"base": digest, "result": digest, "nbytes": of both files,
          "blocks": [[offset in the file, bytes an element, elements, changed, [bytes of each plane]], ...]}
payload  of each block: GAP_PLANES planes of gaps, then as many planes of differences as an element has bytes
```
A plane holds the i-th byte of every number: the upper ones are nearly all zero, and zstandard makes nothing of them.
Both files are safetensors with the same header: names, shapes and dtypes that changed make no delta.
"""

import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from bus.weights.files import Buffer, WeightsCorrupt

MAGIC = b"RSDELTA1"
BLOCK_ELEMENTS = 1 << 22  # what is in memory at once, besides both files
GAP_PLANES = 3  # bytes of a gap, which is below BLOCK_ELEMENTS
LEVEL = 1  # higher ones take longer, and make no less of it
PAYS = 0.25  # of the full file; a larger delta, as of float32 weights, takes longer to make and apply than it saves
_TRIED = 1 / 8  # of the file, after which an encoding that does not pay is given up
_Unsigned = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}

Array = npt.NDArray[Any]


def encode(base: Buffer, result: Buffer, base_digest: str, result_digest: str) -> bytes | None:
    """The delta that makes `result` of `base`, two full files with these digests; None if it does not pay.

    The same files give the same bytes.
    """
    runs = _runs(result)
    if len(base) != len(result) or runs is None or _header(base) != _header(result):
        return None
    compress = zstandard.ZstdCompressor(level=LEVEL).compress
    blocks: list[list[Any]] = []
    payload: list[bytes] = []
    tried = spent = 0
    for offset, size, count in _blocks(runs):
        before, after = (np.frombuffer(whole, _Unsigned[size], count, offset) for whole in (base, result))
        where = np.flatnonzero(before != after)
        tried += size * count
        if not len(where):
            continue
        planes = [compress(plane) for plane in _planes(np.diff(where, prepend=-1).astype("<u4") - 1, GAP_PLANES)]
        planes += [compress(plane) for plane in _planes(_folded(after[where] - before[where]), size)]
        blocks.append([offset, size, count, len(where), [len(plane) for plane in planes]])
        payload += planes
        spent += sum(map(len, planes))
        if spent > PAYS * max(tried, _TRIED * len(result)):
            return None
    described = {"base": base_digest, "result": result_digest, "nbytes": len(result), "blocks": blocks}
    header = json.dumps(described, separators=(",", ":")).encode()
    return b"".join([MAGIC, struct.pack("<I", len(header)), header, *payload])


def apply(delta: Buffer, content: bytearray, base_digest: str, result_digest: str) -> None:
    """Turn `content`, the full file with `base_digest`, into the one with `result_digest`, in place.

    That `content` is the former is believed, so the caller compares the digest of what comes of it. Raises
    WeightsCorrupt, after which `content` is of no use, if the delta is damaged, or is one of other versions.
    """
    try:
        _apply(delta, content, base_digest, result_digest)
    except (ValueError, KeyError, TypeError, IndexError, struct.error, zstandard.ZstdError, OverflowError) as error:
        raise WeightsCorrupt(f"the delta is damaged: {error}") from None


def _apply(delta: Buffer, content: bytearray, base_digest: str, result_digest: str) -> None:
    whole = memoryview(delta)
    at = len(MAGIC) + 4
    if whole[: len(MAGIC)] != MAGIC:
        raise ValueError("it does not begin as one")
    end = at + struct.unpack_from("<I", whole, len(MAGIC))[0]
    header = json.loads(bytes(whole[at:end]))
    if (header["base"], header["result"], header["nbytes"]) != (base_digest, result_digest, len(content)):
        raise WeightsCorrupt(
            f"a delta from {header['base'][:15]}… to {header['result'][:15]}… does not lead from {base_digest[:15]}… "
            f"to {result_digest[:15]}…"
        )
    decompress = zstandard.ZstdDecompressor().decompress
    for offset, size, count, changed, lengths in header["blocks"]:
        if not (0 <= offset <= len(content) - size * count and 0 < changed <= count <= BLOCK_ELEMENTS):
            raise ValueError("a block lies outside of the weights")
        planes: list[bytes] = []
        for length in lengths:
            plane = decompress(whole[end : end + length], max_output_size=changed)
            if length < 0 or len(plane) != changed:
                raise ValueError("a plane has another length")
            planes.append(plane)
            end += length
        if len(planes) != GAP_PLANES + size:
            raise ValueError("planes are missing")
        where = np.cumsum(_joined(planes[:GAP_PLANES], 4).astype(np.int64) + 1) - 1
        if where[-1] >= count:
            raise ValueError("it changes what lies outside of a block")
        elements = np.frombuffer(content, _Unsigned[size], count, offset)
        elements[where] += _unfolded(_joined(planes[GAP_PLANES:], size))
    if end != len(whole):
        raise ValueError("it goes on behind its end")


# ---- both files: runs of elements of one size


def _header(file: Buffer) -> bytes:
    length = int.from_bytes(file[:8], "little")
    return bytes(file[: 8 + length])


def _runs(file: Buffer) -> list[tuple[int, int, int]] | None:
    """(offset, bytes an element, elements) of what lies together in a safetensors file; None if it has no such parts.

    Every byte behind the header is in one run.
    """
    header = _header(file)
    fields: dict[str, Any] = json.loads(header[8:])
    fields.pop("__metadata__", None)
    runs: list[tuple[int, int, int]] = []
    at = len(header)
    for tensor in sorted(fields.values(), key=lambda tensor: tensor["data_offsets"]):
        start, stop = (len(header) + offset for offset in tensor["data_offsets"])
        if start == stop:
            continue
        elements = max(1, int(np.prod(tensor["shape"], dtype=np.int64)))
        size = (stop - start) // elements
        if size not in _Unsigned or size * elements != stop - start:
            size, elements = 1, stop - start  # numbers of less than a byte
        if start != at:
            return None
        if runs and runs[-1][1] == size:
            runs[-1] = runs[-1][0], size, runs[-1][2] + elements
        else:
            runs.append((start, size, elements))
        at = stop
    return runs if at == len(file) else None


def _blocks(runs: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    for offset, size, elements in runs:
        for first in range(0, elements, BLOCK_ELEMENTS):
            yield offset + first * size, size, min(BLOCK_ELEMENTS, elements - first)


# ---- numbers as planes of bytes


def _planes(numbers: Array, count: int) -> list[bytes]:
    """The lowest `count` bytes of each number, byte by byte."""
    table = numbers.view(np.uint8).reshape(len(numbers), -1)
    return [table[:, i].tobytes() for i in range(count)]


def _joined(planes: list[bytes], size: int) -> Array:
    """The inverse: numbers of `size` bytes, the missing planes zero."""
    table = np.zeros((len(planes[0]), size), np.uint8)
    for i, plane in enumerate(planes):
        table[:, i] = np.frombuffer(plane, np.uint8)
    return table.reshape(-1).view(_Unsigned[size])


def _folded(differences: Array) -> Array:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ...: small ones have zeros above, whatever their sign."""
    signs = np.zeros_like(differences) - (differences >> (8 * differences.itemsize - 1))  # all ones if negative
    folded: Array = (differences << 1) ^ signs
    return folded


def _unfolded(numbers: Array) -> Array:
    unfolded: Array = (numbers >> 1) ^ (np.zeros_like(numbers) - (numbers & 1))
    return unfolded
