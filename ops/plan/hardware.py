"""A hardware file: the speeds of a cluster's parts, measured, or derived from what device and model are.

Derived (`device`, `model`, `efficiency`), for an engine of t devices, memory bandwidth W and arithmetic speed F each:

    step of b sequences, c cached tokens   overhead + weights / (t W e_w) + b 2P / (t F e_f) + c kv / (t W e_w)
                                           and for t > 1 two all-reduces a layer
    a token of prefill                     (2P + attention) / (t F e_f)
    a trained token                        4 (2P + attention) / (F e_t)   forward, backward (twice that), old logprobs
    slots                                  what fits beside the weights: memory / (kv * tokens of a running sequence)

with P parameters, kv = 2 * layers * kv_heads * head_size * bytes, and attention = 4 * layers * hidden * c, where c
tokens lie before a token in the mean. Any speed may be given in `speeds` and then stands.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from ops.plan.lengths import Lengths
from ops.plan.speeds import Speeds
from schemas import UserError
from schemas.config import Config

COMMON = (
    "engine_devices",
    "train_step_s",
    "train_loss",
    "reshard_s",
    "reward_s",
    "reward_sigma",
    "reward_parallel",
)
GB = 1e9
TERA = 1e12


class Device(Config):
    """One accelerator, by its data sheet."""

    memory_gb: float = Field(gt=0)
    bandwidth_gb_s: float = Field(gt=0, description="of its memory")
    tflops: float = Field(gt=0, description="dense, in the dtype of the model")


class Model(Config):
    """What of a transformer decides its speed."""

    parameters: float = Field(gt=0)
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0, description="query heads * head_size")
    kv_heads: int = Field(gt=0)
    head_size: int = Field(gt=0)
    bytes: int = Field(2, gt=0, description="of a weight and of a cached number")

    @property
    def weight_bytes(self) -> float:
        """Of all weights."""
        return self.parameters * self.bytes

    @property
    def kv_bytes(self) -> float:
        """Of a token in the cache."""
        return 2.0 * self.layers * self.kv_heads * self.head_size * self.bytes

    def forward_flops(self, context: float) -> float:
        """Of a token with so many before it: the weights, and the attention."""
        return 2.0 * self.parameters + 4.0 * self.layers * self.hidden * context


class Efficiency(Config):
    """The share of the data sheet that is reached, and what no data sheet tells."""

    bandwidth: float = Field(gt=0, le=1, description="of the memory's bandwidth, while decoding")
    prefill: float = Field(gt=0, le=1, description="of the arithmetic, in prefill and in a decode step")
    train: float = Field(gt=0, le=1, description="of the arithmetic, in training")
    memory: float = Field(0.85, gt=0, le=1, description="of the memory, for weights and cache")
    step_overhead_s: float = Field(ge=0, description="scheduling, launching and sampling, a decode step")
    allreduce_s: float = Field(0.0, ge=0, description="one all-reduce between the devices of an engine")
    transfer_gb_s: float = Field(gt=0, description="weights from the trainer to storage, and from there to an engine")
    update_s: float = Field(0.0, ge=0, description="an update of an engine's weights, beside the bytes")
    slots_max: int = Field(512, ge=1, description="the engine's own limit of sequences")


class Hardware(Config):
    """A hardware file. `note` says for people where the numbers come from."""

    note: str = ""
    device: Device | None = None
    model: Model | None = None
    efficiency: Efficiency | None = None
    engine_devices: int = Field(1, ge=1, le=1024)
    train_step_s: float = Field(0.0, ge=0)
    train_loss: float = Field(0.0, ge=0, lt=1)
    reshard_s: float = Field(0.0, ge=0)
    reward_s: float = Field(0.0, ge=0)
    reward_sigma: float = Field(0.0, ge=0)
    reward_parallel: int = Field(1024, ge=1)
    speeds: dict[str, float] = Field(default_factory=dict, description="measured; stand before what is derived")

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = (self.device, self.model, self.efficiency)
        if None in parts and any(part is not None for part in parts):
            raise ValueError("device, model and efficiency belong together: give all three, or speeds alone")
        unknown = set(self.speeds) - set(Speeds.model_fields)
        if unknown:
            raise ValueError(f"speeds: there is no {sorted(unknown)[0]}; there are {', '.join(Speeds.model_fields)}")
        return self

    def speeds_for(self, lengths: Lengths) -> Speeds:
        """The speeds with such answers. Raises `UserError` if something is missing, or the model does not fit."""
        derived = self._derived(lengths) if self.device and self.model and self.efficiency else {}
        common = {name: getattr(self, name) for name in COMMON}
        fields = common | derived | self.speeds
        for name in ("slots", "engine_devices", "reward_parallel"):
            if name in fields:
                fields[name] = int(fields[name])
        try:
            return Speeds(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"The hardware has no usable {'.'.join(map(str, first['loc']))}: {first['msg']}.",
                "Give it under speeds, or give device, model and efficiency.",
            ) from None

    def _derived(self, lengths: Lengths) -> dict[str, Any]:
        device, model, known = self.device, self.model, self.efficiency
        assert device is not None
        assert model is not None
        assert known is not None
        t = self.engine_devices
        bandwidth = t * device.bandwidth_gb_s * GB * known.bandwidth
        flops = t * device.tflops * TERA * known.prefill
        context = lengths.running_context
        free = t * device.memory_gb * GB * known.memory - model.weight_bytes
        slots = int(free / (model.kv_bytes * context))
        if slots < 1:
            raise UserError(
                f"The model's {model.weight_bytes / GB:.0f} GB leave no room for one answer on {t} device(s) of "
                f"{device.memory_gb:g} GB.",
                "Raise engine_devices in the hardware file.",
            )
        allreduce_s = 2 * model.layers * known.allreduce_s if t > 1 else 0.0
        return {
            "slots": min(slots, known.slots_max),
            "decode_base_s": known.step_overhead_s + allreduce_s + model.weight_bytes / bandwidth,
            "decode_row_s": 2 * model.parameters / flops,
            "decode_context_s": model.kv_bytes / bandwidth,
            "prefill_token_s": model.forward_flops(context / 2) / flops,
            "load_s": known.update_s + model.weight_bytes / (known.transfer_gb_s * GB),
            "publish_s": model.weight_bytes / (known.transfer_gb_s * GB),
            "train_token_s": 4 * model.forward_flops(context) / (device.tflops * TERA * known.train),
        }


def presets() -> list[str]:
    """Names of the hardware files that come along."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in files("ops.plan").joinpath("presets").iterdir()
        if entry.name.endswith(".yaml")
    )


def hardware_text(name: str) -> str:
    """The text of a preset, or of a file. Raises `UserError`."""
    if name in presets():
        return files("ops.plan").joinpath("presets", f"{name}.yaml").read_text(encoding="utf-8")
    try:
        return Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"There is no hardware file or preset {name}.", f"The presets are {', '.join(presets())}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The hardware file {name} cannot be read: {error}.", "Name a YAML file.") from None


def load_hardware(name: str) -> Hardware:
    """A preset, or a YAML file. Raises `UserError`."""
    text = hardware_text(name)
    try:
        fields = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"The hardware file {name} is no YAML: {error}.", "Mend it.") from None
    try:
        return Hardware.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(
            f"The hardware file {name}: {key + ': ' if key else ''}{first['msg'].removeprefix('Value error, ')}.",
            "`rollstream plan --show-hardware h800-1.5b` prints one that works.",
        ) from None
