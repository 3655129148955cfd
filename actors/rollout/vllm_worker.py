"""What runs inside vLLM's worker processes: taking new weights, and ending when the rollout worker has ended.

vLLM imports this module in each worker process, before it builds the model, as its `worker_extension_cls`.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.rollout.engine import WeightsError
from actors.rollout.load_weights import read_weights
from actors.rollout.vllm_versions import OWNER, prepare_worker
from bus.adapter import WEIGHT, Adapter, NotAnAdapter, read_adapter

PROBED = 1024  # elements of each tensor that are compared after a load


class WeightLoader:
    """Mixed into vLLM's worker; its methods are called by `collective_rpc`."""

    model_runner: Any
    rollstream_under: tuple[str, tuple[str, ...]] | None = None  # the base that is held, and where adapters changed it

    def rollstream_load(self, path: str, base: str | None = None) -> dict[str, Any]:
        """Overwrite the model's weights with those at `path`, a safetensors file or a directory of them.

        With `base` the weights there are meant, with the LoRA adapter at `path` merged into them. Returns
        `{"probed": n}`, the parameters compared afterwards; `{"refused": why}` if nothing was changed; or
        `{"broken": why}` if the model may now hold a mixture. Never raises: vLLM would lose the reason on its way.
        """
        try:
            tensors, under = weights_at(path, base)
        except WeightsError as error:
            return {"refused": str(error)}
        model = self.model_runner.get_model()
        if isinstance(tensors, Merged) and under == self.rollstream_under:
            tensors = tensors.targeted()
        self.rollstream_under = None
        try:
            loaded = model.load_weights(iter(tensors.items()))
            probed = probe(model, tensors)
            if not isinstance(tensors, Merged) or not tensors.only_targets:
                check_complete(model, loaded)
        except Exception as error:
            return {"broken": f"{type(error).__name__}: {error}"}
        self.rollstream_under = under
        return {"probed": probed}


class Merged(Mapping[str, Tensor]):
    """Whole weights by name with an adapter merged into them, in float32 where it is; each is made when asked for."""

    def __init__(self, adapter: Adapter, base: Mapping[str, Tensor], only_targets: bool = False) -> None:
        self.only_targets = only_targets
        self._adapter = adapter
        self._base = base
        self._modules = {module + WEIGHT: module for module in adapter.shape.targets}
        self._names = list(self._modules if only_targets else base)

    def targeted(self) -> Merged:
        """Of those only the ones that the adapter changes."""
        return Merged(self._adapter, self._base, only_targets=True)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._modules:
            return self._adapter.merged(self._modules[name], self._base[name])
        return self._base[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def weights_at(path: str, base: str | None) -> tuple[Mapping[str, Tensor], tuple[str, tuple[str, ...]] | None]:
    """The weights meant, and under which adapter's targets the base then lies. Raises `WeightsError`."""
    if base is None:
        return read_weights(path), None
    try:
        adapter = read_adapter(Path(path))
    except NotAnAdapter as error:
        raise WeightsError(str(error)) from error
    weights = read_weights(base)
    if misfits := adapter.misfits({name: tuple(tensor.shape) for name, tensor in weights.items()}):
        raise WeightsError(f"the adapter at {path} does not fit its base at {base}: {', '.join(misfits[:3])}")
    return Merged(adapter, weights), (base, adapter.shape.targets)


def check_complete(model: Any, loaded: set[str] | None) -> None:
    """Raises `WeightsError` if a parameter was not loaded, as far as the model tells what was."""
    if loaded is None:
        return
    if lost := sorted({name for name, _ in model.named_parameters()} - loaded):
        raise WeightsError(f"no weights for {', '.join(lost[:3])}, {len(lost)} in all")


def probe(model: Any, tensors: Mapping[str, Tensor]) -> int:
    """Compare elements of the model's parameters with what was loaded; returns how many parameters were compared.

    Parameters that vLLM made of several (q, k and v; gate and up) are compared with their parts. Those that are cut
    over several devices, or of another type than the file's (quantized), are not compared.

    Raises `WeightsError` if one differs.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    compared = 0
    for name, parameter in model.named_parameters():
        whole = _expected(name, tensors, packed)
        if whole is None or whole.dim() != parameter.dim() or not parameter.is_floating_point():
            continue
        if whole.shape[0] > parameter.shape[0] or whole.shape[1:] != parameter.shape[1:]:
            continue
        held = parameter.data[: whole.shape[0]].reshape(-1)  # a vocabulary is padded at its end
        step = max(1, held.numel() // PROBED)
        expected = whole.reshape(-1)[::step].to(held.device, held.dtype)
        if not torch.equal(held[::step], expected):
            raise WeightsError(f"{name} is not what was loaded")
        compared += 1
    return compared


def _expected(name: str, tensors: Mapping[str, Tensor], packed: Mapping[str, list[str]]) -> Tensor | None:
    """What a parameter should hold, by the names of the file; None if the file has no such thing."""
    module = name.split(".")[-2] if "." in name else ""
    names = [name.replace(f".{module}.", f".{part}.") for part in packed.get(module, [module])]
    parts = [tensors.get(part) for part in names]
    whole = [part for part in parts if part is not None]
    return torch.cat(whole) if len(whole) == len(names) else None


def end_with_owner(owner: int) -> None:
    """From now on kill this process, and its parent if that is vLLM's core, when the process `owner` ends.

    vLLM's core does not notice that a killed owner is gone, and would hold its memory for ever.
    """

    def watch() -> None:
        try:
            descriptor = os.pidfd_open(owner)
        except ProcessLookupError:
            descriptor = -1
        if descriptor >= 0:
            select.select([descriptor], [], [])
        core = os.getppid()
        if "EngineCor" in _name_of(core):
            os.kill(core, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watches the rollout worker", daemon=True).start()


def _name_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


if (owner := int(os.environ.get(OWNER, "0"))) and owner != os.getpid():
    end_with_owner(owner)
    prepare_worker()
