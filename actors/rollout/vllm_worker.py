"""What runs inside vLLM's worker processes: taking new weights, and ending when the rollout worker has ended.

vLLM imports this module in each worker process, before it builds the model, as its `worker_extension_cls`.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.rollout.engine import WeightsError
from actors.rollout.load_weights import read_weights
from actors.rollout.vllm_versions import OWNER, prepare_worker

PROBED = 1024  # elements of each tensor that are compared after a load


class WeightLoader:
    """Mixed into vLLM's worker; its methods are called by `collective_rpc`."""

    model_runner: Any

    def rollstream_load(self, path: str) -> dict[str, Any]:
        """Overwrite the model's weights with those at `path`, a safetensors file or a directory of them.

        Returns `{"probed": n}`, the tensors compared afterwards; `{"refused": why}` if nothing was changed; or
        `{"broken": why}` if the model may now hold a mixture. Never raises: vLLM would lose the reason on its way.
        """
        try:
            tensors = read_weights(path)
        except WeightsError as error:
            return {"refused": str(error)}
        model = self.model_runner.get_model()
        try:
            loaded = model.load_weights(iter(tensors.items()))
            return {"probed": probe(model, tensors, loaded)}
        except Exception as error:
            return {"broken": f"{type(error).__name__}: {error}"}


def probe(model: Any, tensors: Mapping[str, Tensor], loaded: set[str] | None) -> int:
    """Compare elements of the model's parameters with what was loaded; returns how many parameters were compared.

    Parameters that vLLM made of several (q, k and v; gate and up) are compared with their parts. Those that are cut
    over several devices, or of another type than the file's (quantized), are not compared.

    Raises `WeightsError` if a parameter was not loaded, or differs.
    """
    parameters = dict(model.named_parameters())
    if loaded is not None and (lost := sorted(parameters.keys() - loaded)):
        raise WeightsError(f"no weights for {', '.join(lost[:3])} and {max(0, len(lost) - 3)} more")
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    compared = 0
    for name, parameter in parameters.items():
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
    if name in tensors:
        return tensors[name]
    module = name.split(".")[-2] if "." in name else ""
    parts = [name.replace(f".{module}.", f".{part}.") for part in packed.get(module, [])]
    if not parts or any(part not in tensors for part in parts):
        return None
    return torch.cat([tensors[part] for part in parts])


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
