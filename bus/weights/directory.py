"""Weights' bytes in a shared or local directory: one file a version, whole or not there; see `bus.weights.files`.

The event (`WeightVersion`) announces; this holds what it points to. Readers memory-map full files.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bus.weights import tensors as safetensors
from bus.weights.chain import needed
from bus.weights.files import (
    ASIDE,
    Buffer,
    WeightsError,
    WeightsMissing,
    check_file,
    digest_of,
    full_file,
    version_and_base,
    write_whole,
)
from schemas import WeightVersion

if TYPE_CHECKING:  # importing the bus stays light
    import torch

_ABANDONED_S = 3600.0  # a file aside that nobody wrote to for so long belongs to a writer that died


class WeightStore:
    """A directory of versions. One writer at a time, any number of readers."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def publish(self, version: int, tensors: Mapping[str, "torch.Tensor"]) -> WeightVersion:
        """Write `tensors` as `version`, in full, durably and atomically; returns what to announce.

        The same tensors give the same bytes, so publishing again after a crash changes nothing.
        """
        content = safetensors.to_bytes(tensors)
        return self.write(full_file(version, digest_of(content), len(content)), content)

    def write(self, event: WeightVersion, content: Buffer) -> WeightVersion:
        """Write the file that `event` announces, unless it is there; returns the event."""
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            self.verify(event)
        except WeightsError:
            write_whole(self.root / event.path, content, durable=True)
        return event

    def resolve(self, path: str) -> Path:
        """The absolute path of `WeightVersion.path`. Raises WeightsMissing if it is not there or not in the store."""
        full = (self.root / path).resolve()
        if full.parent != self.root.resolve() or not full.is_file():
            raise WeightsMissing(
                f"no weights at {path!r} in {self.root}: they were collected, or this machine does not share the "
                "trainer's weights directory; take a newer version, or mount that directory here"
            )
        return full

    def verify(self, event: WeightVersion) -> Path:
        """The path of an event's file, after its bytes were checked. Raises WeightsMissing or WeightsCorrupt."""
        return check_file(event, self.resolve(event.path))

    def load(self, event: WeightVersion) -> dict[str, "torch.Tensor"]:
        """The tensors of a full version as published, tied names included (they share memory again), verified.

        Raises WeightsMissing or WeightsCorrupt.
        """
        return safetensors.load(self.verify(event))

    def names(self) -> set[str]:
        """Of the files that are there."""
        return {path.name for path in self.root.glob("v*") if version_and_base(path.name)}

    def collect(self, keep_from_version: int, keep: set[int]) -> list[int]:
        """Delete the versions below `keep_from_version` that are not in `keep` and that no kept one stands on.

        Returns them, ascending. Also deletes what writers that died left aside.
        """
        files = {path: place for path in self.root.glob("v*") if (place := version_and_base(path.name))}
        stays = needed(files.values(), keep_from_version, keep)
        collected = set()
        for path, (version, _) in files.items():
            if version not in stays:
                path.unlink(missing_ok=True)
                collected.add(version)
        for path in self.root.glob(f"{ASIDE}*"):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)
        return sorted(collected)
