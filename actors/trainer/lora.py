"""LoRA with peft: adapters in a model whose own weights are frozen, and the names under which both are known.

Adapters are injected into the model itself, which stays what it was for all that calls it. peft renames on the way:

```
model.layers.0.mlp.up_proj.weight   ->   model.layers.0.mlp.up_proj.base_layer.weight
                                         model.layers.0.mlp.up_proj.lora_A.default.weight    [rank, in], random
                                         model.layers.0.mlp.up_proj.lora_B.default.weight    [out, rank], zeros
```
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from actors.trainer.sections import ALL_LINEAR, LORA_REMEDY, LoraConfig
from bus.adapter import WEIGHT, A, Adapter, AdapterShape, B
from schemas.errors import UserError, did_you_mean

ADAPTER = "default"  # peft's own name for the only one
_BASE = ".base_layer."
_OWN = {end: f"{end.removesuffix(WEIGHT)}.{ADAPTER}{WEIGHT}" for end in (A, B)}  # by the end of a published name
NEAR_SHOWN = 3


class Lora:
    """The adapters of a model; `attach` makes them. `state` is always tensors by the names that peft gives."""

    def __init__(self, model: PreTrainedModel, shape: AdapterShape, peft_config: Any) -> None:
        self.shape = shape
        self._peft_config = peft_config
        self._layers = [model.get_submodule(name) for name in shape.targets]
        self._names = {module + own: module + end for module in shape.targets for end, own in _OWN.items()}
        # before anybody puts them into shards
        self._sizes = {name: tuple(model.get_parameter(name).shape) for name in self._names}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Meanwhile the model is the base, bit by bit: x + 0 · BAx."""
        scalings = [layer.scaling for layer in self._layers]
        try:
            for layer in self._layers:
                layer.scaling = {ADAPTER: 0.0}  # type: ignore[assignment]  # peft keeps a plain dict there
            yield
        finally:
            for layer, scaling in zip(self._layers, scalings, strict=True):
                layer.scaling = scaling

    def adapter(self, state: Mapping[str, Tensor]) -> Adapter:
        """The adapter by its published names; empty if `state` is, as on ranks other than 0."""
        return Adapter({self._names[name]: state[name] for name in sorted(state)}, self.shape)

    def base(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The base by the model's own names."""
        return {name.replace(_BASE, "."): tensor for name, tensor in state.items() if name not in self._names}

    def whole(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights by the model's own names, with the adapter merged into them."""
        adapter = self.adapter({name: state[name] for name in self._names if name in state})
        return adapter.over(self.base(state))

    def fits(self, state: Mapping[str, Tensor]) -> bool:
        """Whether `state` is an adapter like this one."""
        return {name: tuple(tensor.shape) for name, tensor in state.items()} == self._sizes

    def save(self, adapter: Adapter, folder: Path, base: str) -> None:
        """Write it as peft does, for `PeftModel.from_pretrained`; `base` is where its base model is to be found."""
        from safetensors.torch import save_file

        self._peft_config.base_model_name_or_path = base
        self._peft_config.save_pretrained(folder)
        tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in adapter.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def attach(model: PreTrainedModel, config: LoraConfig, seed: int) -> Lora:
    """Freeze `model` and put new adapters into it, in place of those that it has; the same seed gives the same.

    They change nothing yet, for B is 0. Raises `UserError` if peft is missing or a target fits no layer.
    """
    peft = _peft()
    detach(model)
    targets = resolve_targets(model, config.targets)
    transposed = tuple(name for name in targets if isinstance(model.get_submodule(name), Conv1D))
    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=_short(model, targets),
        fan_in_fan_out=bool(transposed),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # it draws numbers that are replaced below
        peft.inject_adapter_in_model(peft_config, model, ADAPTER)
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that adapters begin alike on every device
    with torch.no_grad():
        for name in targets:
            a = model.get_parameter(name + _OWN[A])
            a.copy_(nn.init.kaiming_uniform_(torch.empty(a.shape), a=math.sqrt(5), generator=generator))
    return Lora(model, AdapterShape(config.rank, config.alpha, config.scale, targets, transposed), peft_config)


def detach(model: PreTrainedModel) -> None:
    """Take adapters out again, if there are any; then all weights of `model` are trainable."""
    if "peft_config" not in vars(model):
        return
    for name, module in list(model.named_modules()):
        base = getattr(module, "base_layer", None)
        if base is not None:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, base)
    del model.peft_config
    model.requires_grad_(True)


def check_checkpoint(lora: Lora | None, state: Mapping[str, Tensor]) -> None:
    """That the weights in a checkpoint are such as `lora`, or a model without adapters, holds. Raises `UserError`."""
    is_adapter = any(name.endswith(own) for name in state for own in _OWN.values())
    if lora.fits(state) if lora is not None else not is_adapter:
        return
    held = "a LoRA adapter" if is_adapter else "a whole model"
    if lora is None or not is_adapter:
        told = f"The checkpoint holds {held}, and the recipe has {'no' if lora is None else 'a'} trainer.lora"
    else:
        told = f"The checkpoint holds {held} of another rank or other targets than trainer.lora has"
    raise UserError(
        f"{told}.", "Set trainer.lora as it was when the run began, or begin anew: a new run, or a replay from step 0."
    )


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise UserError(f"trainer.lora: {error}.", LORA_REMEDY) from error
    return peft


def resolve_targets(model: PreTrainedModel, targets: Sequence[str]) -> tuple[str, ...]:
    """The linear layers that are meant, sorted. Raises `UserError`, with what is near, if a target fits none."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    found: set[str] = set()
    for target in targets:
        if target == ALL_LINEAR:
            matches = {name for name in layers if model.get_submodule(name) is not head}
        else:
            matches = {name for name in layers if _matches(name, target)}
        if not matches:
            raise _unmatched(model, target, layers)
        found |= matches
    tied = model.get_input_embeddings().weight
    for name in sorted(found):
        if model.get_submodule(name).weight is tied:
            raise UserError(
                f"trainer.lora.targets names {name}, which shares its weights with the input embedding: an adapter "
                "would change one of the two.",
                "Leave it out; all-linear does.",
            )
    return tuple(sorted(found))


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _unmatched(model: PreTrainedModel, target: str, layers: Sequence[str]) -> UserError:
    others = {type(module).__name__ for name, module in model.named_modules() if name and _matches(name, target)}
    if others:
        what = f"which is no linear layer of {type(model).__name__} but {' and '.join(sorted(others))}"
    else:
        what = f"and no linear layer of {type(model).__name__} is called so"
    names = sorted({name.rpartition(".")[2] for name in layers})
    near = difflib.get_close_matches(target.rpartition(".")[2], names, n=NEAR_SHOWN, cutoff=0.5)
    remedy = did_you_mean(near) if near else f"There are {', '.join(names)}; or write {ALL_LINEAR}."
    return UserError(f"trainer.lora.targets names {target}, {what}.", remedy)


def _short(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """What to call the targets in peft's own files: by the last part of their names, if that means just them."""
    last = sorted({name.rpartition(".")[2] for name in targets})
    meant = [name for name, _ in model.named_modules() if any(_matches(name, each) for each in last)]
    return last if sorted(meant) == list(targets) else list(targets)
