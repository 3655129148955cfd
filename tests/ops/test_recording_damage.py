"""Files are cut off, bits flip, and people name the wrong file: what is left is read, what is wrong is named."""

from __future__ import annotations

import dataclasses
import json
import random
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest

from bus.port import Entry
from bus.table import ROLLOUTS
from ops import audit
from ops.log_source import initial_model_of, open_log
from ops.recording.directory import FIRST_WITHIN_BYTES
from ops.recording.format import (
    BLOCK_BYTES,
    BLOCK_RAW_MAX,
    ENTRIES,
    FILE,
    HEAD,
    META,
    SYNC,
    TRAILER_BYTES,
    ZLIB,
    Block,
    Damaged,
    digest_of,
    pack_head,
    pack_index,
    pack_payload,
    unpack_block,
    unpack_entries,
    unpack_index,
    unpack_meta,
    unpack_payload,
    unpack_piece,
)
from schemas import UserError
from tests.ops.recordings import Place, all_of, make_recording, named_in, places_of
from tests.ops.sound_log import RUN

FLIPS = 400
CUTS = 150
SEED = 5


class Whole:
    """A whole recording, and what is in it."""

    def __init__(self, path: Path, entries: dict[tuple[str, int], Entry]) -> None:
        self.path = path
        self.data = path.read_bytes()
        self.entries = entries
        self.places = places_of(path)

    def damaged(self, data: bytes) -> Path:
        """A file with these bytes."""
        path = self.path.with_name("damaged.rollstream")
        path.write_bytes(data)
        return path

    def flipped(self, *bits: int) -> Path:
        """The file with some of its bits changed."""
        data = bytearray(self.data)
        for bit in bits:
            data[bit // 8] ^= 1 << bit % 8
        return self.damaged(bytes(data))

    def of_stream(self, name: str) -> list[Place]:
        """The blocks of a stream."""
        return [place for place in self.places if place.block.kind == ENTRIES and place.block.name == name]


@pytest.fixture
async def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Whole:
    path = await make_recording(tmp_path / "whole.rollstream", monkeypatch)
    entries, damage = await all_of(path)
    assert damage == ()
    return Whole(path, entries)


async def left_of(whole: Whole, path: Path) -> tuple[set[tuple[str, int]], tuple[str, ...]]:
    """Which entries are left, after checking that they are true and that all others are named."""
    entries, damage = await all_of(path)
    assert damage
    assert all(whole.entries[place] == entry for place, entry in entries.items())
    lost = whole.entries.keys() - entries.keys()
    assert lost <= named_in(damage), (sorted(lost - named_in(damage)), damage)
    return set(entries), damage


async def test_a_cut_file_is_read_up_to_the_cut_and_what_is_missing_named(whole: Whole) -> None:
    """Around the edge of every block, and anywhere else."""
    rng = random.Random(SEED)
    edges = {edge + off for place in whole.places for edge in (place.start, place.end) for off in (-1, 0, 1)}
    first_end = whole.places[0].end
    cuts = {cut for cut in edges if first_end <= cut < len(whole.data)}
    cuts |= {rng.randrange(first_end, len(whole.data)) for _ in range(CUTS)}
    for cut in sorted(cuts):
        left, damage = await left_of(whole, whole.damaged(whole.data[:cut]))
        blocks = [p.block for p in whole.places if p.end <= cut and p.block.kind == ENTRIES]
        assert len(left) == sum(block.count for block in blocks)
        assert left == {(name, seq) for name, seq in whole.entries if any(_holds(b, name, seq) for b in blocks)}
        assert "does not end as a recording does" in damage[0]


def _holds(block: Block, name: str, seq: int) -> bool:
    return block.name == name and block.first <= seq <= block.last


async def test_a_file_cut_within_its_first_block_is_no_recording(whole: Whole) -> None:
    """There is nothing to read; a sentence tells, and no traceback."""
    for cut in range(whole.places[0].end):
        path = whole.damaged(whole.data[:cut])
        with pytest.raises(UserError, match="is empty" if cut == 0 else "is no recording of Rollstream, or nothing"):
            await audit.main(str(path), as_json=True)


async def test_any_flipped_bit_is_found_and_costs_one_block_at_most(whole: Whole) -> None:
    """Of disks and networks that change a bit in a terabyte."""
    rng = random.Random(SEED)
    largest = max(place.block.count for place in whole.places)
    for _ in range(FLIPS):
        left, _ = await left_of(whole, whole.flipped(rng.randrange(8 * len(whole.data))))
        assert len(whole.entries) - len(left) <= largest


async def test_every_bit_of_the_head_and_the_end_is_watched(whole: Whole) -> None:
    """All entries are read although the file's own tables are wrong."""
    size = len(whole.data)
    index_at = whole.places[-1].end
    ends = [*range(8 * HEAD.size), *range(8 * (size - TRAILER_BYTES), 8 * size, 5), *range(8 * index_at, 8 * size, 97)]
    for bit in ends:
        left, _ = await left_of(whole, whole.flipped(bit))
        assert left == whole.entries.keys()


async def test_several_damaged_places_are_all_named(whole: Whole) -> None:
    rng = random.Random(SEED)
    for _ in range(60):
        bits = [rng.randrange(8 * whole.places[0].end, 8 * len(whole.data)) for _ in range(6)]
        await left_of(whole, whole.flipped(*bits))


async def test_a_part_taken_out_is_named(whole: Whole) -> None:
    """Of a file put together from pieces, one of which was forgotten."""
    one, two, *_ = whole.of_stream("rollouts")
    left, damage = await left_of(whole, whole.damaged(whole.data[: one.start] + whole.data[one.end :]))
    assert whole.entries.keys() - left == {("rollouts", seq) for seq in range(one.block.first, one.block.last + 1)}
    assert f"rollouts {one.block.first} to {one.block.last} are missing" in damage
    zeros = bytes(two.end - one.start)
    left, damage = await left_of(whole, whole.damaged(whole.data[: one.start] + zeros + whole.data[two.end :]))
    assert f"block {one.block.number} (rollouts {one.block.first} to {one.block.last}) is damaged" in "".join(damage)


async def test_bytes_behind_the_end_are_named(whole: Whole) -> None:
    left, damage = await left_of(whole, whole.damaged(whole.data + b"more"))
    assert left == whole.entries.keys()
    size = len(whole.data)
    assert f"bytes {size:,} to {size + 3:,} are damaged or no part of it" in damage


async def test_an_index_of_another_recording_is_not_believed(whole: Whole) -> None:
    """Its own sums are right; only the digest of the whole tells that it is not this file's."""
    at = whole.places[-1].end
    header = unpack_block(whole.data[at : at + BLOCK_BYTES])
    assert header is not None
    places = unpack_index(unpack_payload(header, whole.data[at + BLOCK_BYTES : at + BLOCK_BYTES + header.stored]))
    start, block = places[-2]
    places[-2] = start, dataclasses.replace(block, first=block.first + 1)
    codec, stored = pack_payload(pack_index(places))
    header = dataclasses.replace(header, codec=codec, stored=len(stored), digest=digest_of(stored))
    other = whole.data[:at] + header.packed() + stored + whole.data[-TRAILER_BYTES:]
    left, damage = await left_of(whole, whole.damaged(other))
    assert left == whole.entries.keys()
    assert damage == ("the index does not fit the file",)


async def test_a_recording_without_its_descriptions_is_read(whole: Whole) -> None:
    """The run's name and recipe stand in its entries too."""
    data = bytearray(whole.data)
    for place in whole.places:
        if place.block.kind == META:
            data[place.start : place.end] = bytes(place.end - place.start)
    entries, damage = await all_of(whole.damaged(bytes(data)))
    assert entries == whole.entries
    assert any("its description is lost" in sentence for sentence in damage)
    async with open_log(str(whole.damaged(bytes(data)))) as log:
        assert log.run == RUN


async def test_the_audit_tells_of_damage_and_its_status_shows_it(
    whole: Whole, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script must not take what could not be read for what was proved."""
    assert await audit.main(str(whole.path), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["damage"] == []
    block = whole.of_stream("rollouts")[1]
    path = str(whole.flipped(8 * (block.start + BLOCK_BYTES + 9)))
    assert await audit.main(path, as_json=False) == 1
    shown = capsys.readouterr().out
    name = f"block {block.block.number} (rollouts {block.block.first} to {block.block.last})"
    assert f"damage: {name} is damaged: its bytes are not those that were written" in shown
    assert "THE RECORDING IS DAMAGED" in shown


async def test_a_damaged_file_of_the_model_is_found_by_the_audit_and_not_extracted(
    whole: Whole, tmp_path: Path
) -> None:
    """Weights with a changed bit would train, and differ."""
    for place in [place for place in whole.places if place.block.kind == FILE]:
        path = str(whole.flipped(8 * (place.end - 1)))
        assert await audit.main(path, as_json=True) == 1
        async with open_log(path) as log:
            with pytest.raises(UserError, match=r"The initial model in .* is damaged: \w+\.\w+ cannot be read whole"):
                initial_model_of(log, tmp_path / "model")
        assert not (tmp_path / "model").exists()
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize(
    "content",
    [b"x", b"name: recipe\n" * 100, bytes(1 << 16), b"\x89PNG\r\n\x1a\n" + bytes(300), SYNC * 500, pack_head()],
    ids=["a byte", "text", "zeros", "a picture", "marks only", "a head only"],
)
async def test_another_kind_of_file_is_no_recording(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is no recording of Rollstream, or nothing of it is left"):
        await audit.main(str(path), as_json=False)


async def test_a_huge_other_file_is_refused_without_reading_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    began = time.process_time()
    with pytest.raises(UserError, match="is no recording"):
        await audit.main(str(path), as_json=False)
    assert time.process_time() - began < 2.0
    assert FIRST_WITHIN_BYTES > BLOCK_RAW_MAX


async def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file or directory"):
        await audit.main(str(tmp_path / "gone.rollstream"), as_json=False)


# ---- bytes made to harm: digests are right, contents are not


def block_of(content: bytes, **changes: Any) -> tuple[Block, bytes]:
    stored = zlib.compress(content, 9)
    fields = {
        "kind": ENTRIES, "codec": ZLIB, "number": 0, "count": 1, "stored": len(stored), "raw": len(content), "first": 1,
        "last": 1, "name": "rollouts", "digest": digest_of(stored),
    }  # fmt: skip
    return Block(**{**fields, **changes}), stored


def test_a_length_that_lies_allocates_nothing() -> None:
    """A header may promise, and a few bytes may unpack to, any number of gigabytes."""
    for changes in ({"stored": 0xFFFFFFFF}, {"raw": 0xFFFFFFFF}):
        assert unpack_block(block_of(b"x", **changes)[0].packed()) is None
    block, stored = block_of(bytes(200 << 20), raw=1000)
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="does not unpack to the 1,000 bytes that it names"):
            unpack_payload(block, stored)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


GOOD = [(1).to_bytes(8, "little"), bytes(8), None, [{"a": "b"}], [b"x"]]


@pytest.mark.parametrize(
    "columns",
    [
        [], GOOD[:4], [b"", *GOOD[1:]], [*GOOD[:3], [], []], [*GOOD[:3], [{}], ["text"]], [*GOOD[:3], [[]], [b""]],
        [*GOOD[:3], [{"Nats-Msg-Id": 5}], [b"x"]], [*GOOD[:2], [5], *GOOD[3:]], [(2).to_bytes(8, "little"), *GOOD[1:]],
        7, {"a": 1}, [*GOOD[:3], 5, 6],
    ],
)  # fmt: skip
def test_columns_that_are_no_entries_are_damage(columns: Any) -> None:
    """Whoever reads the entries relies on their types."""
    block, _ = block_of(b"")
    assert unpack_entries(ROLLOUTS, block, msgpack.packb(GOOD))
    with pytest.raises(Damaged):
        unpack_entries(ROLLOUTS, block, msgpack.packb(columns))


def test_lists_that_promise_more_than_they_hold_are_damage() -> None:
    block, _ = block_of(b"")
    for lie in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdd\x00\x0f\xff\xff" * 5000, b"\xc1", b""):
        tracemalloc.start()
        try:
            with pytest.raises(Damaged):
                unpack_entries(ROLLOUTS, block, b"\x95" + lie)
            with pytest.raises(Damaged):
                unpack_meta(lie)
            assert tracemalloc.get_traced_memory()[1] < 40 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("path", ["/etc/passwd", "../out", "a/../../out", "", ".", "a\\..\\b", "a\0b"])
def test_a_file_of_the_model_stays_in_its_folder(path: str) -> None:
    """A recording comes from anywhere."""
    with pytest.raises(Damaged):
        unpack_piece(msgpack.packb([path, 0, b"x"]))
    assert unpack_piece(msgpack.packb(["sub/a.json", 0, b"x"])) == ("sub/a.json", 0, b"x")
