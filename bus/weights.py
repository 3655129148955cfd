"""Weights' bytes in a shared or local directory: one safetensors file a version, whole or not there.

The event (`WeightVersion`) announces; this holds what it points to. Readers memory-map the file.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing the bus stays light
    import torch

_METADATA = "rollstream"  # one key only: safetensors writes several in random order, and equal tensors need equal bytes
_ASIDE = ".tmp-"
_ABANDONED_S = 3600.0  # a file aside that nobody wrote to for so long belongs to a writer that died


class WeightsError(Exception):
    """The bytes of a weight version cannot be used."""


class WeightsMissing(WeightsError):
    """There is no such file."""


class WeightsCorrupt(WeightsError):
    """The file's bytes are not those that were published."""


@dataclass(frozen=True)
class WeightFile:
    """Where the bytes of a version are, and what they must be.

    Example: `WeightFile(7, "v000007-1f3a90bc.safetensors", "sha256-1f3a90bc…", 415392)`.
    """

    version: int
    path: str  # relative to the store's root
    digest: str  # "sha256-" and 64 hex digits, of the file
    nbytes: int


class WeightStore:
    """A directory of versions. One writer at a time, any number of readers."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def publish(self, version: int, tensors: Mapping[str, "torch.Tensor"]) -> WeightFile:
        """Write `tensors` as `version`, durably and atomically; returns what to announce.

        The same tensors give the same bytes, so publishing again after a crash changes nothing. Tensors that share
        their memory (tied embeddings) are stored once, under the name that comes first in `tensors`; `load` gives all.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self.root.mkdir(parents=True, exist_ok=True)
        stored, aliases = _untie(tensors)
        aside = self.root / f"{_ASIDE}{version}-{os.getpid()}"
        try:
            try:
                save_file(stored, aside, metadata={_METADATA: json.dumps({"aliases": aliases}, sort_keys=True)})
            except SafetensorError as error:  # it tells the system's error in words only
                raise _system_error(error, aside) or error from None
            aside.chmod(0o644)  # workers may run as other users
            with open(aside, "rb") as file:
                digest = f"sha256-{hashlib.file_digest(file, 'sha256').hexdigest()}"
                os.fsync(file.fileno())
            name = f"v{version:06d}-{digest.removeprefix('sha256-')[:8]}.safetensors"
            weight_file = WeightFile(version, name, digest, aside.stat().st_size)
            if not self._holds(weight_file):
                os.rename(aside, self.root / name)
                sync_folder(self.root)
        finally:
            aside.unlink(missing_ok=True)
        return weight_file

    def resolve(self, path: str) -> Path:
        """The absolute path of `WeightFile.path`. Raises WeightsMissing if it is not there or is not in the store."""
        full = (self.root / path).resolve()
        if full.parent != self.root.resolve() or not full.is_file():
            raise WeightsMissing(
                f"no weights at {path!r} in {self.root}: they were collected, or this machine does not share the "
                "trainer's weights directory; take a newer version, or mount that directory here"
            )
        return full

    def verify(self, weight_file: WeightFile) -> Path:
        """The path of the file, after its bytes were checked. Raises WeightsMissing or WeightsCorrupt."""
        path = self.resolve(weight_file.path)
        nbytes = path.stat().st_size
        if nbytes != weight_file.nbytes:
            raise WeightsCorrupt(
                f"version {weight_file.version} at {path} has {nbytes} bytes instead of {weight_file.nbytes}: delete "
                "it and restart the trainer, which publishes it again"
            )
        with open(path, "rb") as file:
            digest = f"sha256-{hashlib.file_digest(file, 'sha256').hexdigest()}"
        if digest != weight_file.digest:
            raise WeightsCorrupt(
                f"version {weight_file.version} at {path} has digest {digest} instead of {weight_file.digest}: delete "
                "it and restart the trainer, which publishes it again"
            )
        return path

    def load(self, weight_file: WeightFile) -> dict[str, "torch.Tensor"]:
        """The tensors as published, tied names included (they share memory again), verified, on the CPU.

        Raises WeightsMissing or WeightsCorrupt.
        """
        from safetensors import safe_open

        with safe_open(self.verify(weight_file), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
            aliases: dict[str, str] = json.loads(file.metadata()[_METADATA])["aliases"]
        return tensors | {alias: tensors[name] for alias, name in aliases.items()}

    def collect(self, keep_from_version: int, keep: set[int]) -> list[int]:
        """Delete the versions below `keep_from_version` that are not in `keep`; returns them, ascending.

        Also deletes what writers that died left aside.
        """
        collected = set()
        for path in self.root.glob("v*-*.safetensors"):
            version = int(path.name[1:].split("-")[0])
            if version < keep_from_version and version not in keep:
                path.unlink(missing_ok=True)
                collected.add(version)
        for path in self.root.glob(f"{_ASIDE}*"):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)
        return sorted(collected)

    def _holds(self, weight_file: WeightFile) -> bool:
        try:
            self.verify(weight_file)
        except WeightsError:
            return False
        return True


def sync_folder(folder: Path) -> None:
    """Have a folder's names on the disk: a rename is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _system_error(error: Exception, path: Path) -> OSError | None:
    found = re.search(r"os error (\d+)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1])), str(path)) if found else None


def _untie(tensors: Mapping[str, "torch.Tensor"]) -> tuple[dict[str, "torch.Tensor"], dict[str, str]]:
    """Each memory once, contiguous and on the CPU; and alias -> stored name."""
    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in first:
            aliases[name] = first[memory]
            continue
        first[memory] = name
        plain = tensor.detach().cpu().contiguous()
        # safetensors refuses views of one memory, even if they do not overlap
        whole = plain.untyped_storage().nbytes() == plain.nbytes
        stored[name] = plain if whole else plain.clone()
    return stored, aliases
