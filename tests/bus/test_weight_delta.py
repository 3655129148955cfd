"""A delta must give back every bit, of whatever numbers: wrong weights would train on, and nobody would know."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bus.weights import WeightsCorrupt, delta
from bus.weights.files import digest_of
from bus.weights.tensors import to_bytes

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def tensor_of(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


def naive(base: bytes, result: bytes, size: int) -> list[tuple[int, bytes]]:
    """The twin: every element that differs, one by one."""
    return [
        (at, result[at : at + size])
        for at in range(0, len(result), size)
        if base[at : at + size] != result[at : at + size]
    ]


@st.composite
def versions(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Two versions of some tensors, with any bits in them: NaNs with their payloads, -0.0, subnormals, infinities."""
    before, after = {}, {}
    for name in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        nbytes = int(np.prod(shape)) * dtype.itemsize
        raw = draw(st.binary(min_size=nbytes, max_size=nbytes))
        other = bytearray(raw)
        for at in draw(st.lists(st.integers(0, max(0, nbytes - 1)), max_size=6)) if nbytes else []:
            other[at] = draw(st.integers(0, 255))
        before[f"t{name}"], after[f"t{name}"] = (tensor_of(bytes(r), dtype, shape) for r in (raw, other))
    return to_bytes(before), to_bytes(after)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small deltas are mostly header, and would not pay."""
    monkeypatch.setattr(delta, "PAYS", 1e9)


@given(versions(), st.sampled_from([1, 3, 1 << 22]))
def test_every_bit_comes_back(pair: tuple[bytes, bytes], block: int) -> None:
    base, result = pair
    was, delta.BLOCK_ELEMENTS = delta.BLOCK_ELEMENTS, block
    try:
        encoded = delta.encode(base, result, "a", "b")
        assert encoded is not None
        assert encoded == delta.encode(base, result, "a", "b")
        content = bytearray(base)
        delta.apply(encoded, content, "a", "b")
    finally:
        delta.BLOCK_ELEMENTS = was
    assert content == result


@given(st.binary(min_size=1, max_size=64), st.binary(min_size=1, max_size=64), st.sampled_from([1, 2, 4, 8]))
def test_differences_of_any_size_fold_and_unfold(first: bytes, second: bytes, size: int) -> None:
    count = min(len(first), len(second)) // size
    before, after = (np.frombuffer(raw[: count * size], f"<u{size}") for raw in (first, second))
    folded = delta._folded(after - before)
    assert (
        (before + delta._unfolded(delta._joined(delta._planes(folded, size), size)) == after).all() if count else True
    )


def test_it_holds_what_changed_and_no_more() -> None:
    """Against the twin: as many elements as differ one by one, and little more than their number in bytes."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(200_000, generator=generator)
    moved = table.clone()
    where = torch.randperm(200_000, generator=generator)[:2000]
    moved[where] *= 1.01
    base, result = to_bytes({"w": table.bfloat16()}), to_bytes({"w": moved.bfloat16()})
    start = len(base) - 400_000
    changed = len(naive(base[start:], result[start:], 2))
    encoded = delta.encode(base, result, "a", "b")
    assert encoded is not None
    assert 1500 < changed <= 2000
    assert len(encoded) < 3 * changed < len(base) / 50


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.zeros(4, 2), "new": torch.zeros(1)},
        {"v": torch.zeros(4, 2)},
        {"w": torch.zeros(2, 4)},
        {"w": torch.zeros(4, 2, dtype=torch.int32)},
    ],
    ids=["added", "renamed", "reshaped", "of another dtype"],
)
def test_other_tensors_make_no_delta(other: dict[str, torch.Tensor]) -> None:
    assert delta.encode(to_bytes({"w": torch.zeros(4, 2)}), to_bytes(other), "a", "b") is None


def test_untied_weights_make_no_delta() -> None:
    """The names of tied ones stand in the header: a reader would tie what is tied no more."""
    table = torch.ones(4, 2)
    tied, apart = ({"a": table, "b": other} for other in (table, table.clone()))
    assert delta.encode(to_bytes(tied), to_bytes(apart), "a", "b") is None


def test_what_changes_everywhere_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "PAYS", 0.25)
    monkeypatch.setattr(delta, "BLOCK_ELEMENTS", 1000)
    generator = torch.Generator().manual_seed(5)
    one, two = (to_bytes({"w": torch.randn(50_000, generator=generator)}) for _ in range(2))
    seen = []
    planes = delta._planes
    monkeypatch.setattr(delta, "_planes", lambda *of: (seen.append(1), planes(*of))[1])
    assert delta.encode(one, two, "a", "b") is None
    assert len(seen) < 2 * 10  # it is seen early: of 50 blocks no more than a few were encoded


def example() -> tuple[bytes, bytes, bytes]:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(3000, generator=generator)
    base, result = (to_bytes({"w": t.bfloat16(), "b": t[:7]}) for t in (table, table * 1.001))
    encoded = delta.encode(base, result, digest_of(base), digest_of(result))
    assert encoded is not None
    return base, result, encoded


def refused_or_exact(encoded: bytes) -> bool:
    """Whether damage was noticed, by the decoder or by the digest of what came of it. Fails if it crashes otherwise."""
    base, result, _ = example()
    content = bytearray(base)
    try:
        delta.apply(encoded, content, digest_of(base), digest_of(result))
    except WeightsCorrupt:
        return True
    return digest_of(content) != digest_of(result) or content == result


def test_damaged_deltas_never_crash_and_never_pass() -> None:
    """Any byte, also those of the header: the decoder must say that the delta is damaged, or the digest does."""
    _, _, encoded = example()
    dice = random.Random(7)
    for _ in range(300):
        broken = bytearray(encoded)
        broken[dice.randrange(len(broken))] ^= 1 << dice.randrange(8)
        assert refused_or_exact(bytes(broken))
    for length in (0, 3, 8, 11, 12, 60, len(encoded) // 2, len(encoded) - 1):
        assert refused_or_exact(encoded[:length])
    assert refused_or_exact(encoded + b"\0")


def test_a_delta_for_another_base_or_result_is_refused() -> None:
    base, result, encoded = example()
    for wrong in ((digest_of(result), digest_of(result)), (digest_of(base), digest_of(base))):
        with pytest.raises(WeightsCorrupt, match="does not lead from"):
            delta.apply(encoded, bytearray(base), *wrong)
    with pytest.raises(WeightsCorrupt, match="does not lead from"):
        delta.apply(encoded, bytearray(base[:-1]), digest_of(base), digest_of(result))
