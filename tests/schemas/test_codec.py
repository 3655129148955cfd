"""Hostile bytes: whatever arrives, the reader gets a message or `MalformedMessage`, with bounded memory and time."""

import contextlib
import random
import time
import tracemalloc

import msgpack
import pytest
from hypothesis import example as explicit
from hypothesis import given
from hypothesis import strategies as st

from schemas import PAYLOAD_BYTES_MAX, MalformedMessage, decode
from tests.schemas.examples import EXAMPLES, golden_path

GOLDEN_BYTES = [golden_path(message).read_bytes() for message in EXAMPLES]
SMALL_PEAK_BYTES = 40 << 20  # nested headers that promise 4096 items each, down to msgpack's own depth limit
FULL_BYTES = PAYLOAD_BYTES_MAX // 4  # a large payload; memory grows with it, and so does the time of this test
FULL_PEAK_BYTES = 50 << 20
DECODE_S_MAX = 5.0


def refuse_or_read(payload: bytes) -> None:
    """Any other exception fails the test."""
    with contextlib.suppress(MalformedMessage):
        decode(payload)


@given(st.binary(max_size=300))
@explicit(b"")
@explicit(b"\xc1")
@explicit(msgpack.packb([]))
@explicit(msgpack.packb(["prompt", 1, {}, 4]))
@explicit(msgpack.packb(["prompt", "1", {}]))
@explicit(msgpack.packb(["prompt", True, {}]))
@explicit(msgpack.packb(["prompt", 1.0, {}]))
@explicit(msgpack.packb([b"prompt", 1, {}]))
@explicit(msgpack.packb(["prompt", 1, []]))
@explicit(msgpack.packb(["prompt", 1, {1: 2}]))
@explicit(msgpack.packb(["no such type", 1, {}]))
@explicit(msgpack.packb({"type": "prompt"}))
def test_random_bytes_are_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(payload)


@given(st.sampled_from(GOLDEN_BYTES), st.data())
def test_truncated_bytes_are_malformed(golden: bytes, data: st.DataObject) -> None:
    with pytest.raises(MalformedMessage):
        decode(golden[: data.draw(st.integers(0, len(golden) - 1))])


FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), max_size=4)


@given(st.sampled_from(GOLDEN_BYTES), FLIPS)
def test_flipped_bits_never_crash(golden: bytes, flips: list[tuple[float, int]]) -> None:
    """Some still make a message, with another number in it; none may raise anything else."""
    changed = bytearray(golden)
    for where, bit in flips:
        changed[int(where * len(changed))] ^= 1 << bit
    refuse_or_read(bytes(changed))


@given(st.sampled_from(GOLDEN_BYTES), st.binary(min_size=1, max_size=20), st.floats(0, 1))
def test_inserted_bytes_never_crash(golden: bytes, inserted: bytes, where: float) -> None:
    at = int(where * len(golden))
    refuse_or_read(golden[:at] + inserted + golden[at:])


def test_trailing_bytes_are_malformed() -> None:
    """Two messages in one payload: the second would be lost in silence."""
    for golden in GOLDEN_BYTES:
        with pytest.raises(MalformedMessage):
            decode(golden + golden)


LIES = {
    "array32": b"\xdd\xff\xff\xff\xff",
    "map32": b"\xdf\xff\xff\xff\xff",
    "bin32": b"\xc6\xff\xff\xff\xff",
    "str32": b"\xdb\xff\xff\xff\xff",
    "ext32": b"\xc9\xff\xff\xff\xff\x05",
    "array16 at the limit": b"\xdc\x10\x00",
    "map16 at the limit": b"\xde\x10\x00",
}


@pytest.mark.parametrize("repeats", [1, 100, 20_000])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_lengths_that_lie_allocate_nothing(lie: bytes, repeats: int) -> None:
    """A few bytes that promise gigabytes, alone and nested."""
    for payload in (lie * repeats, b"\x93\xa6prompt\x01" + lie * repeats):
        assert peak_bytes(payload) < SMALL_PEAK_BYTES


def full(item: bytes) -> bytes:
    """A prompt of `FULL_BYTES` whose task is made of lists of `item`."""
    row = b"\xdc\x0f\xff" + item * 4095
    rows = min(4095, FULL_BYTES // len(row))
    return b"\x93\xa6prompt\x01\x81\xa4task\xdc" + rows.to_bytes(2, "big") + row * rows


@pytest.mark.parametrize(
    "item",
    [
        b"\x90", b"\x80", b"\x91\x90", b"\x81\xa1a\x90", b"\xa2ab", b"\xc4\x01x", b"\xcb" + b"\x01" * 8,
        b"\xce\xff\xff\xff\xff",
    ],
    ids=["lists", "maps", "lists of lists", "maps of lists", "strings", "bytes", "floats", "integers"],
)  # fmt: skip
def test_a_full_payload_of_small_objects_stays_within_bounds(item: bytes) -> None:
    """One byte on the wire can become 64 in memory: 8 MB, half a gigabyte, in every reader at once."""
    assert peak_bytes(full(item)) < FULL_PEAK_BYTES


def test_deep_nesting_is_malformed() -> None:
    for opener in (b"\x91", b"\x81\xa1a"):
        assert peak_bytes(opener * 100_000 + b"\xc0") < SMALL_PEAK_BYTES


def test_a_payload_above_the_limit_is_not_even_parsed() -> None:
    with pytest.raises(MalformedMessage, match="the limit is"):
        decode(b"\x90" * (PAYLOAD_BYTES_MAX + 1))


def test_a_long_wrong_value_is_named_briefly() -> None:
    """The reason goes into a header and a log line."""
    for junk in ("x" * 7_000_000, b"x" * 7_000_000, [["x" * 1000] * 4000]):
        with pytest.raises(MalformedMessage) as caught:
            decode(msgpack.packb(["dropped", 1, {"group_id": junk, "index": 0, "reason": "stale"}]))
        assert len(caught.value.reason) < 200


def test_a_storm_of_random_changes_is_survived() -> None:
    """Many quick ones, with a fixed seed, beside Hypothesis' few clever ones."""
    rng = random.Random(7)
    for _ in range(3000):
        payload = bytearray(rng.choice(GOLDEN_BYTES))
        for _ in range(rng.randrange(1, 6)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        refuse_or_read(bytes(payload))


def peak_bytes(payload: bytes) -> int:
    """The most memory that decoding took; the payload must be malformed and decoding quick."""
    began_s = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            decode(payload)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        assert time.process_time() - began_s < DECODE_S_MAX
