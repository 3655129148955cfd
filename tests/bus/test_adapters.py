"""An adapter is a version of its own: its file, and below it a base that need not be read for every one of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bus.adapter import A, Adapter, AdapterShape, B, NotAnAdapter, read_adapter
from bus.weights import WeightsCorrupt, WeightsMissing, WeightStore
from bus.weights.tensors import load, load_whole
from tests.bus.published_weights import Published


def adapter(seed: int, transposed: bool = False) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"up{A}": torch.randn(2, 5, generator=generator), f"up{B}": torch.randn(7, 2, generator=generator)}
    return Adapter(tensors, AdapterShape(2, 4.0, 2.0, ("up",), ("up",) if transposed else ()))


BASE = {"up.weight": torch.linspace(-1, 1, 35).view(7, 5).bfloat16(), "rest": torch.ones(3)}


@pytest.fixture
def published(tmp_path: Path) -> Published:
    """Version 0 whole, versions 1 to 3 as adapters over it."""
    made = Published(tmp_path)
    for version in range(4):
        snapshot = made.writer.snapshot(version, adapter(version) if version else BASE)
        made.events[version] = made.writer.publish(snapshot)
    return made


async def test_all_weights_of_a_version_are_the_base_with_its_adapter(published: Published, tmp_path: Path) -> None:
    local = await published.reader(tmp_path / "cache").fetch(published.events[2])
    whole = load_whole(local.path, local.base)
    a, b = (adapter(2)[f"up{end}"] for end in (A, B))
    assert torch.equal(whole["up.weight"], (BASE["up.weight"].float() + 2.0 * (b @ a)).bfloat16())
    assert torch.equal(whole["rest"], BASE["rest"])
    assert local.base is not None
    assert all(torch.equal(tensor, BASE[name]) for name, tensor in load(local.base).items())


async def test_a_base_is_checked_once_and_again_when_it_was_touched(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    verify = WeightStore.verify
    monkeypatch.setattr(WeightStore, "verify", lambda self, e: (read.append(e.version), verify(self, e))[1])
    reader = published.reader(tmp_path / "cache")
    for version in (1, 2, 3):
        await reader.fetch(published.events[version])
    assert read == [0, 1, 2, 3]
    base = published.store.resolve(published.events[0].path)
    os.utime(base)
    await reader.fetch(published.events[3])
    assert read[4:] == [0, 3]
    base.write_bytes(base.read_bytes()[:-1] + b"x")
    with pytest.raises(WeightsCorrupt):
        await reader.fetch(published.events[3])
    base.unlink()
    with pytest.raises(WeightsMissing):
        await reader.fetch(published.events[3])


async def test_an_adapter_over_an_adapter_is_refused(published: Published, tmp_path: Path) -> None:
    reader = published.reader(tmp_path / "cache")
    for base in (2, 3):  # another, and itself
        with pytest.raises(WeightsMissing, match="adapter over version"):
            await reader.fetch(replace(published.events[3], base=base))


def test_a_base_is_kept_as_long_as_an_adapter_stands_on_it(published: Published) -> None:
    assert published.store.collect(3, set()) == [1, 2]
    assert published.store.names() == {published.events[version].path for version in (0, 3)}


def test_an_adapter_file_tells_all_that_its_reader_needs(published: Published) -> None:
    path = published.store.resolve(published.events[1].path)
    read = read_adapter(path)
    assert read.shape == adapter(1).shape
    assert all(torch.equal(read[name], tensor) for name, tensor in adapter(1).items())
    with pytest.raises(NotAnAdapter):
        read_adapter(published.store.resolve(published.events[0].path))


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ({"up.weight": (7, 5)}, []),
        ({"up.weight": (5, 7)}, ["up (7, 5) for (5, 7)"]),
        ({"down.weight": (7, 5)}, ["up is not in the base"]),
    ],
)
def test_what_does_not_fit_is_named(shapes: dict[str, tuple[int, ...]], told: list[str]) -> None:
    assert adapter(0).misfits(shapes) == told
    assert adapter(0, transposed=True).misfits({name: size[::-1] for name, size in shapes.items()}) == [
        phrase.replace("(7, 5) for (5, 7)", "(5, 7) for (7, 5)") for phrase in told
    ]
