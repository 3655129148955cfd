"""What is deleted is gone: no version may go that a reader, an unfinished chain or a checkpoint needs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bus.weights import WeightStore
from bus.weights.files import adapter_name, delta_name, full_name

DIGEST = "sha256-" + "0123abcd" * 8


@st.composite
def histories(draw: st.DrawFn) -> dict[int, list[int]]:
    """By version, the versions that its files stand on, -1 for a full one. Some have two: a delta, and the full file
    that a trainer which was started again wrote beside it."""
    stands_on: dict[int, list[int]] = {0: [-1]}
    for version in range(1, draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["full", "delta", "delta", "delta", "adapter", "both"]))
        base = {"full": [-1], "delta": [version - 1], "adapter": [draw(st.integers(0, version - 1))]}
        stands_on[version] = base.get(kind, [version - 1, -1])
    return stands_on


def naive(stands_on: dict[int, list[int]], keep_from: int, keep: set[int]) -> set[int]:
    """The twin: whatever can be reached from what must stay, step by step until nothing more comes."""
    stays = {version for version in stands_on if version >= keep_from} | keep
    while True:
        more = stays | {base for version in stays for base in stands_on.get(version, []) if base >= 0}
        if more == stays:
            return stays
        stays = more


@given(histories(), st.integers(0, 15), st.sets(st.integers(0, 14), max_size=3))
def test_what_stays_is_what_can_be_reached_from_what_must(
    stands_on: dict[int, list[int]], keep_from: int, keep: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = WeightStore(Path(folder))
        for version, bases in stands_on.items():
            for base in bases:
                of = adapter_name if base not in (-1, version - 1) else delta_name
                name = full_name(version, DIGEST) if base == -1 else of(version, DIGEST, base)
                (store.root / name).touch()
        stays = naive(stands_on, keep_from, keep) & stands_on.keys()
        assert store.collect(keep_from, keep) == sorted(stands_on.keys() - stays)
        left = {int(name[1:7]) for name in store.names()}
        assert left == stays
        assert len(store.names()) == sum(len(stands_on[version]) for version in stays)
