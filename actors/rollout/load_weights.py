"""Reading a version's weights from safetensors into a model that is in use, all of them or none."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from actors.rollout.engine import WeightsError

_INDEX = "model.safetensors.index.json"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Tensors by name (memory-mapped), from a `.safetensors` file or a directory of them, sharded or not.

    Raises `WeightsError` if there are none or they cannot be read.
    """
    path = Path(path)
    try:
        if (path / _INDEX).is_file():
            shards = set(json.loads((path / _INDEX).read_text())["weight_map"].values())
            files = [path / shard for shard in sorted(shards)]
        else:
            files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise WeightsError(f"cannot read weights from {path}: {error}") from error
    if not tensors:
        raise WeightsError(f"no *.safetensors with weights in {path}")
    return tensors


def copy_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the model's parameters and persistent buffers in place, cast to their dtype, by state-dict name.

    Of tensors that share memory (tied embeddings) one name is enough. Checks names and shapes before it writes
    anything; raises `WeightsError` where they do not match.
    """
    targets = model.state_dict()
    unknown = sorted(tensors.keys() - targets.keys())
    given = {targets[name].data_ptr() for name in tensors.keys() & targets.keys()}
    missing = sorted(name for name, target in targets.items() if target.data_ptr() not in given)
    misshapen = sorted(
        f"{name} {tuple(tensor.shape)} for {tuple(targets[name].shape)}"
        for name, tensor in tensors.items()
        if name in targets and tensor.shape != targets[name].shape
    )
    for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", misshapen)):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise WeightsError(f"weights do not fit {type(model).__name__}: {what}: {shown}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
