"""The weights of a run: who writes them, and how any process of it gets them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bus.port import Bus
from bus.table import WEIGHTS
from bus.weights import HostCache, WeightReader, WeightStore, WeightWriter
from ops.host import weights_folder
from ops.recipe import Recipe
from schemas import WeightVersion


def writer_of(recipe: Recipe, folder: Path) -> WeightWriter:
    """The writer of the run in `folder`; one process of a run has it."""
    publish = recipe.trainer.publish
    return WeightWriter(WeightStore(weights_folder(folder)), publish.full_every, publish.delta)


def reader_of(bus: Bus, folder: Path) -> WeightReader:
    """A reader of the run in `folder`; close it when no weights are wanted any more."""

    async def event_of(version: int) -> WeightVersion:
        (entry,) = await bus.get(WEIGHTS, [version + 1])  # version v stands at sequence v + 1
        message = entry.message()
        assert isinstance(message, WeightVersion)
        return message

    return WeightReader(event_of, WeightStore(weights_folder(folder)), HostCache(bus.run))


def kept_weights(folder: Path, versions: Mapping[int, WeightVersion]) -> WeightReader:
    """A reader of what is left in the run's folder, by the events that were read before."""

    async def event_of(version: int) -> WeightVersion:
        return versions[version]

    return WeightReader(event_of, WeightStore(weights_folder(folder)), HostCache(f"kept-{os.getpid()}"))
