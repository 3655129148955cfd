"""A run's weights as a trainer publishes them, for the tests of those who read them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from bus.weights import HostCache, WeightReader, WeightStore, WeightWriter
from bus.weights.reader import Source
from bus.weights.writer import Road
from schemas import WeightVersion


def weights(version: int, size: int = 4000) -> dict[str, torch.Tensor]:
    """bfloat16 weights of which one in a hundred changes from version to version; two names are tied."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(size, generator=generator)
    for step in range(version):
        changed = torch.randint(size, (size // 100,), generator=torch.Generator().manual_seed(step + 1))
        table[changed] *= 1.01
    bias = torch.full((3,), float(version), dtype=torch.float64)
    tied = table.bfloat16()
    return {"embed.weight": tied, "norm.bias": bias, "head.weight": tied}


class Published:
    """A store with versions in it, and the events that announced them."""

    def __init__(self, root: Path, full_every: int = 5, road: Road | None = None) -> None:
        self.store = WeightStore(root / "weights")
        self.writer = WeightWriter(self.store, full_every, delta=True, road=road)
        self.events: dict[int, WeightVersion] = {}
        self.contents: dict[int, bytes] = {}  # of the full file of each version
        self._before = None

    def publish(self, versions: Iterable[int]) -> None:
        for version in versions:
            snapshot = self.writer.snapshot(version, weights(version))
            self.contents[version] = snapshot.content
            self.events[version] = self.writer.publish(snapshot, self._before)
            self._before = snapshot

    async def event_of(self, version: int) -> WeightVersion:
        try:
            return self.events[version]
        except KeyError:
            raise LookupError(version) from None

    def reader(self, cache: Path, road: Source | None = None, store: WeightStore | None = None) -> WeightReader:
        return WeightReader(self.event_of, store or self.store, HostCache("a-run", cache), road)
