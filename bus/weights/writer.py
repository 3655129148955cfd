"""Publishing a version: in full, as what changed since the version before, or as a LoRA adapter."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from bus.adapter import Adapter
from bus.weights import delta, tensors
from bus.weights.directory import WeightStore
from bus.weights.files import Buffer, adapter_name, delta_name, digest_of, full_file
from schemas import WeightVersion

if TYPE_CHECKING:  # importing the bus stays light
    import torch


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The weights of a version as the bytes of a file, which later steps do not change.

    `stands_on` is the version that an adapter belongs to; -1 for whole weights.
    """

    version: int
    content: bytes
    stands_on: int = -1

    @functools.cached_property
    def digest(self) -> str:
        """The digest of `content`."""
        return digest_of(self.content)


class Road(Protocol):
    """Another way to the readers, beside the directory; `bus.weights.objects.ObjectRoad` is it."""

    def put(self, name: str, content: Buffer) -> None:
        """Store a file, whole and durable once this returns."""

    def collect(self, keep: set[str]) -> None:
        """Delete all files but those of these names."""


class WeightWriter:
    """Writes versions into a store, and to `road` if there is one. Every `full_every`-th version is full.

    The kind of a version follows from its number and its bytes alone, so that a trainer that trains it again after a
    crash writes the same. Files of the road that are called as in `keep_on_road` are never collected.
    """

    def __init__(
        self,
        store: WeightStore,
        full_every: int = 1,
        delta: bool = False,
        road: Road | None = None,
        keep_on_road: Iterable[str] = (),
    ) -> None:
        self.store = store
        self.full_every = full_every
        self.delta = delta
        self.road = road
        self.keep_on_road = frozenset(keep_on_road)

    def snapshot(self, version: int, weights: Mapping[str, torch.Tensor]) -> Snapshot:
        """A copy of the weights, or of the adapter, to be published later."""
        stands_on = weights.shape.base if isinstance(weights, Adapter) else -1
        return Snapshot(version, tensors.to_bytes(weights), stands_on)

    def publish(self, snapshot: Snapshot, before: Snapshot | None = None) -> WeightVersion:
        """Write a version, durably; returns what to announce. `before` are the weights that a delta may stand on.

        Without them it is written whole, beside the delta that a former life may have announced: then readers have it
        whatever became of the files that the delta stands on.
        """
        event, content = self._encoded(snapshot, before)
        self.store.write(event, content)
        if self.road is not None:
            self.road.put(event.path, content)
        return event

    def collect(self, keep_from_version: int, keep: set[int]) -> list[int]:
        """See `WeightStore.collect`; the road keeps what the store keeps."""
        collected = self.store.collect(keep_from_version, keep)
        if self.road is not None:
            self.road.collect(self.store.names() | self.keep_on_road)
        return collected

    def _encoded(self, snapshot: Snapshot, before: Snapshot | None) -> tuple[WeightVersion, Buffer]:
        version, digest = snapshot.version, snapshot.digest
        if snapshot.stands_on >= 0:
            event = WeightVersion(
                version=version,
                kind="adapter",
                base=snapshot.stands_on,
                path=adapter_name(version, digest, snapshot.stands_on),
                digest=digest,
                nbytes=len(snapshot.content),
            )
            return event, snapshot.content
        changes = self._changes(snapshot, before)
        if changes is None or before is None:
            return full_file(version, digest, len(snapshot.content)), snapshot.content
        event = WeightVersion(
            version=version,
            kind="delta",
            base=before.version,
            path=delta_name(version, digest, before.version),
            digest=digest_of(changes),
            nbytes=len(changes),
            result=digest,
        )
        return event, changes

    def _changes(self, snapshot: Snapshot, before: Snapshot | None) -> bytes | None:
        """The delta, if there is to be one."""
        due = self.delta and snapshot.version % self.full_every != 0
        if not due or before is None or before.stands_on >= 0 or before.version != snapshot.version - 1:
            return None
        return delta.encode(before.content, snapshot.content, before.digest, snapshot.digest)
