"""A LoRA adapter as a weight version: for each targeted matrix W = W_base + scale · B A, and nothing of the rest.

The file holds A and B by the name of their module; whatever else a reader needs stands in the file's metadata:

```
model.layers.0.mlp.up_proj.lora_A.weight    [rank, in]
model.layers.0.mlp.up_proj.lora_B.weight    [out, rank]
```
Nothing here needs torch when it is imported.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing the bus stays light
    from torch import Tensor

METADATA = "rollstream"  # one key only: safetensors writes several in random order, and equal tensors need equal bytes
A, B, WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"


class NotAnAdapter(Exception):
    """The file holds something else, or cannot be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterShape:
    """What an adapter is, but for its numbers. `scale` is alpha / rank, or alpha / √rank with rsLoRA.

    Example: `AdapterShape(8, 16.0, 2.0, ("model.layers.0.mlp.up_proj",), ())`.
    """

    rank: int
    alpha: float
    scale: float
    targets: tuple[str, ...]  # modules, sorted
    transposed: tuple[str, ...] = ()  # those of them that keep their weight as [in, out], as GPT-2 does
    base: int = 0  # the version that it stands on


class Adapter(Mapping[str, "Tensor"]):
    """The tensors of an adapter by name, all of its targets, with its shape."""

    def __init__(self, tensors: Mapping[str, "Tensor"], shape: AdapterShape) -> None:
        self.shape = shape
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> "Tensor":
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def describe(self) -> dict[str, Any]:
        """Its shape as plain data, for the file's metadata."""
        return dataclasses.asdict(self.shape)

    def merged(self, module: str, base: "Tensor") -> "Tensor":
        """The weight of a targeted module, float32, from that of the base, in any dtype and on its device."""
        a, b = (self._tensors[module + end].to(base.device) for end in (A, B))
        return merged(base, a, b, self.shape.scale, module in self.shape.transposed)

    def over(self, base: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
        """All weights by name, in the dtypes of the whole weights `base`, of which the untargeted are not copied."""
        targets = {module + WEIGHT: module for module in self.shape.targets}
        return {
            name: self.merged(targets[name], tensor).to(tensor.dtype) if name in targets else tensor
            for name, tensor in base.items()
        }

    def misfits(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """What keeps it from standing on weights of these shapes, a phrase each."""
        told = []
        for module in self.shape.targets:
            wanted = shapes.get(module + WEIGHT)
            if wanted is None or not {module + A, module + B} <= self._tensors.keys():
                told.append(f"{module} is not in {'the adapter' if wanted else 'the base'}")
                continue
            made = (self._tensors[module + B].shape[0], self._tensors[module + A].shape[1])
            made = made[::-1] if module in self.shape.transposed else made
            if made != tuple(wanted):
                told.append(f"{module} {made} for {tuple(wanted)}")
        named = {module + end for module in self.shape.targets for end in (A, B)}
        return told + [f"{name} belongs to no target" for name in self._tensors if name not in named]


def merged(base: "Tensor", a: "Tensor", b: "Tensor", scale: float, transposed: bool) -> "Tensor":
    """W_base + scale · B A, float32 and computed so, whatever the dtypes; `transposed`: W_base is [in, out].

    `base` [out, in], `a` [rank, in], `b` [out, rank]. The same operations as peft's own merge.
    """
    product = b.float() @ a.float()
    return base.float() + (product.T if transposed else product) * scale


def read_adapter(path: Path) -> Adapter:
    """The adapter in a file, memory-mapped. Raises `NotAnAdapter`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads(file.metadata()[METADATA])["adapter"]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        tuples = {key: tuple(told[key]) for key in ("targets", "transposed")}
        return Adapter(tensors, AdapterShape(**told | tuples))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise NotAnAdapter(f"{path} holds no adapter: {type(error).__name__}: {error}") from error
