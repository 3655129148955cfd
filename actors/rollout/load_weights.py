"""Reading a version's weights from safetensors into a model that is in use, all of them or none."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from actors.rollout.engine import WeightsError
from bus.adapter import WEIGHT, Adapter, NotAnAdapter, read_adapter

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """Weights that fit the model, to be written into it: `tensors` by name, or those of `base` below an `adapter`."""

    tensors: Mapping[str, Tensor]
    adapter: Adapter | None = None
    base: str = ""


class WeightLoader:
    """Gives a model one version after another, in place.

    Reading is apart from writing: it touches nothing of the model but its names, shapes and dtypes, so it may go on in
    another thread while the model is in use.

    Of an adapter's base no copy is kept: matrices that are targeted are read again, through the memory map, whenever
    the next adapter comes; all others are left as they are. While one is merged, it is in memory in float32.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._under: tuple[str, tuple[str, ...]] | None = None  # the base that is held, and where adapters changed it

    def read(self, path: str | Path, base: str | Path | None = None) -> ReadWeights:
        """The weights at `path`, in the model's dtypes; with `base` those there, and the adapter at `path` for them.

        Raises `WeightsError` if they do not fit.
        """
        if base is None:
            targets, weights = self._model.state_dict(), read_weights(path)
            check_fit(self._model, targets, weights)
            return ReadWeights({name: tensor.to(targets[name].dtype) for name, tensor in weights.items()})
        try:
            adapter = read_adapter(Path(path))
        except NotAnAdapter as error:
            raise WeightsError(str(error)) from error
        weights = read_weights(base)
        misfits = adapter.misfits({name: tuple(tensor.shape) for name, tensor in weights.items()})
        if misfits:
            raise WeightsError(f"the adapter at {path} does not fit its base at {base}: {', '.join(misfits[:3])}")
        check_fit(self._model, self._model.state_dict(), weights)
        return ReadWeights(weights, adapter, str(base))

    def write(self, read: ReadWeights) -> None:
        """Hold what was read."""
        if read.adapter is None:
            self._under = None
            write_weights(self._model, read.tensors)
            return
        under = (read.base, read.adapter.shape.targets)
        if self._under != under:
            self._under = None
            write_weights(self._model, read.tensors)
        self._merge(read.adapter, read.tensors)
        self._under = under

    def _merge(self, adapter: Adapter, base: Mapping[str, Tensor]) -> None:
        targets = self._model.state_dict()
        with torch.no_grad():
            for module in adapter.shape.targets:
                target = targets[module + WEIGHT]
                target.copy_(adapter.merged(module, base[module + WEIGHT].to(target.device)))


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


def check_fit(model: nn.Module, targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """That `tensors` have the names and shapes of the model's state dict, `targets`. Raises `WeightsError`.

    Of tensors that share memory (tied embeddings) one name is enough.
    """
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


def write_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the model's parameters and persistent buffers in place, cast to their dtype, by state-dict name."""
    targets = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
