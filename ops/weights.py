"""The weights of a run: who writes them, and how any process of it gets them, on any machine."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

from bus.jetstream import JetStreamBus
from bus.port import Bus
from bus.table import WEIGHTS
from bus.weights import HostCache, WeightReader, WeightsMissing, WeightStore, WeightWriter
from bus.weights.objects import ObjectRoad
from ops.folders import RUNS
from ops.host import Role, initial_model, replace_folder, weights_folder
from ops.recipe import Recipe
from schemas import UserError, WeightVersion

INITIAL = "initial.tar"  # version 0 with its config and tokenizer, as it goes over the bus
NEED_FOLDER: tuple[Role, ...] = ("trainer",)  # checkpoints lie there, and the model is written there


def road_of(bus: Bus, recipe: Recipe) -> ObjectRoad | None:
    """The road over the bus, if the run's weights go there too."""
    if recipe.bus.weights != "both" or not isinstance(bus, JetStreamBus):
        return None
    return ObjectRoad(bus.url, bus.run, recipe.bus.replicas)


def writer_of(bus: Bus, recipe: Recipe, folder: Path) -> WeightWriter:
    """The writer of the run in `folder`; one process of a run has it. Blocks: the initial model goes over the bus."""
    road = road_of(bus, recipe)
    if road is not None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(initial_model(folder), arcname=".")
        road.put(INITIAL, packed.getbuffer())
    publish = recipe.trainer.publish
    return WeightWriter(WeightStore(weights_folder(folder)), publish.full_every, publish.delta, road, {INITIAL})


def reader_of(bus: Bus, recipe: Recipe, folder: Path) -> WeightReader:
    """A reader of the run in `folder`; close it when no weights are wanted any more."""

    async def event_of(version: int) -> WeightVersion:
        (entry,) = await bus.get(WEIGHTS, [version + 1])  # version v stands at sequence v + 1
        message = entry.message()
        assert isinstance(message, WeightVersion)
        return message

    return WeightReader(event_of, WeightStore(weights_folder(folder)), _cache_of(bus), road_of(bus, recipe))


def _cache_of(bus: Bus) -> HostCache:
    """Runs of one name are on different servers, but may have workers on one host."""
    if not isinstance(bus, JetStreamBus):
        return HostCache(bus.run)
    return HostCache(f"{bus.run}-{hashlib.sha256(bus.server.encode()).hexdigest()[:8]}")


def kept_weights(folder: Path, versions: Mapping[int, WeightVersion]) -> WeightReader:
    """A reader of what is left in the run's folder, by the events that were read before."""

    async def event_of(version: int) -> WeightVersion:
        return versions[version]

    return WeightReader(event_of, WeightStore(weights_folder(folder)), HostCache(f"kept-{os.getpid()}"))


async def folder_here(bus: Bus, recipe: Recipe, folder: Path, role: Role) -> Path:
    """The run's folder as this machine has it: `folder`, or one of our own with what came over the bus.

    Raises `UserError` if neither can be had.
    """
    if initial_model(folder).exists():
        return folder
    road = road_of(bus, recipe)
    if road is None or role in NEED_FOLDER:
        otherwise = "" if role in NEED_FOLDER else "; or start the run with bus.weights=both, which sends weights here"
        raise UserError(
            f"This machine does not see the run's folder {folder}, where the weights lie.",
            f"Mount it here at the same path, or give its place with --run{otherwise}.",
        )
    here = RUNS / bus.run
    if not initial_model(here).exists():
        try:
            packed = await asyncio.to_thread(road.get, INITIAL)
        except WeightsMissing:
            raise UserError(
                f"The trainer of {bus.run} has not sent the initial model over the bus yet.",
                "Try again in a moment.",
            ) from None
        aside = here / f".initial-{os.getpid()}"
        aside.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(aside, filter="data")
        replace_folder(aside, initial_model(here))
    return here
