"""Tensors as the bytes of a safetensors file, and back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bus.adapter import METADATA, Adapter, read_adapter

if TYPE_CHECKING:  # importing the bus stays light
    import torch


def to_bytes(tensors: Mapping[str, "torch.Tensor"]) -> bytes:
    """The full file of these weights; a copy, so that they may change afterwards. Equal tensors give equal bytes.

    Tensors that share their memory (tied embeddings) are stored once, under the name that comes first in `tensors`;
    `load` gives all. Of an adapter its metadata tell the shape; see `bus.adapter`.
    """
    from safetensors.torch import save

    stored, aliases = _untie(tensors)
    told: dict[str, Any] = {"adapter": tensors.describe()} if isinstance(tensors, Adapter) else {"aliases": aliases}
    content: bytes = save(stored, metadata={METADATA: json.dumps(told, sort_keys=True)})
    return content


def load(path: Path) -> dict[str, "torch.Tensor"]:
    """The tensors of a full file, tied names included (they share memory again), memory-mapped, on the CPU."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        aliases: dict[str, str] = json.loads(file.metadata()[METADATA])["aliases"]
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def load_whole(path: Path, base: Path | None = None) -> dict[str, "torch.Tensor"]:
    """All weights of a version: those in a full file; with `base` those there, with the adapter at `path` merged.

    Raises `bus.adapter.NotAnAdapter`.
    """
    return load(path) if base is None else read_adapter(path).over(load(base))


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
