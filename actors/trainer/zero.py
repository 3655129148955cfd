"""The policy's optimizer in shards: DeepSpeed ZeRO, behind the same interface as `optimizer.Optimizer`.

ZeRO 1 shards the optimizer's state over the ranks, 2 the gradients too, 3 the weights too. The algorithm is the same
code. A checkpoint holds whole tensors, by name, as that of the torch backend: it resumes with any backend, stage and
number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.trainer.config import TrainerConfig
from actors.trainer.forward import model_traits
from actors.trainer.optimizer import frozen_names, hyperparameters, schedule
from actors.trainer.ranks import Ranks
from schemas import UserError

if TYPE_CHECKING:
    from types import ModuleType

log = structlog.get_logger(__name__)
T = TypeVar("T")

MOMENTS = ("exp_avg", "exp_avg_sq")


class _Called(torch.nn.Module):
    """What DeepSpeed drives: all that is done with the model goes through one forward, with its hooks around."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[PreTrainedModel], T]) -> T:
        return call(self.model)


class ZeroOptimizer:
    """See `optimizer.Optimizer`; every method is collective.

    Raises `UserError` if DeepSpeed is not installed.
    """

    def __init__(self, model: PreTrainedModel, config: TrainerConfig, ranks: Ranks) -> None:
        deepspeed = _deepspeed()
        model_traits(model)  # tried while the model is whole
        self._deepspeed = deepspeed
        self._config = config
        self._ranks = ranks
        self._model = model
        self._sharded = config.zero.stage == 3
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        adam = torch.optim.AdamW(self._parameters, **hyperparameters(config, config.lr))
        self._engine, *_ = deepspeed.initialize(model=_Called(model), optimizer=adam, config=_settings(config))
        self._engine.train(False)

    def forward(self, call: Callable[[PreTrainedModel], T]) -> T:
        """What `call` makes of the model."""
        result: T = self._engine(call)
        return result

    def backward(self, total: Tensor, last: bool) -> None:
        """See `PolicyOptimizer`. DeepSpeed takes the mean over the ranks where the sum is meant."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(total * self._ranks.count)

    def schedule(self, step: int) -> float:
        """See `Optimizer`."""
        lr = self._config.lr * schedule(step, self._config)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def update(self, step: int) -> float:
        """See `Optimizer`; but a step whose gradient is not finite has already been taken when that is seen.

        Raises `FloatingPointError` then: the newest checkpoint is sound.
        """
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not np.isfinite(norm):
            raise FloatingPointError(f"step {step}: the gradient's norm is {norm}, and the step has been taken")
        return norm

    def weights(self, dtype: torch.dtype, trained: bool = False) -> dict[str, Tensor]:
        """See `PolicyOptimizer`. Shards are gathered for one tensor after the other, and kept on the CPU."""
        return self._collected(lambda parameter: parameter.detach().to("cpu", dtype, copy=True), trained)

    def model_state(self) -> dict[str, Tensor]:
        """See `PolicyOptimizer`: the weights that the optimizer keeps in float32."""
        from deepspeed.utils import safe_get_full_fp32_param

        masters = {id(p): self._kept(safe_get_full_fp32_param(p)) for p in self._parameters}
        return self._collected(lambda p: masters[id(p)] if id(p) in masters else p.detach().cpu().clone(), trained=True)

    def _collected(self, take: Callable[[torch.nn.Parameter], Tensor], trained: bool) -> dict[str, Tensor]:
        """On rank 0 what `take` makes of each parameter, whole at that moment, and the buffers; empty elsewhere.

        `trained`: without what is frozen.
        """
        taken: dict[int, Tensor] = {}
        for parameter in self._parameters if trained else self._model.parameters():
            with self._whole(parameter):
                if self._ranks.rank == 0:
                    taken[id(parameter)] = take(parameter)
        if self._ranks.rank:
            return {}
        named = {
            name: taken[id(p)] for name, p in self._model.named_parameters(remove_duplicate=False) if id(p) in taken
        }
        left_out = frozen_names(self._model) if trained else set()
        state = self._model.state_dict()
        return {name: named.get(name, tensor) for name, tensor in state.items() if name not in left_out}

    def state_dict(self) -> dict[str, Any]:
        """That of torch's AdamW, whole, on rank 0; empty elsewhere."""
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = [float(state["step"]) for state in self._inner.state.values() if "step" in state]
        state: dict[int, dict[str, Tensor]] = {}
        for i, parameter in enumerate(self._parameters if steps else ()):
            moments = {key: self._kept(safe_get_full_optimizer_state(parameter, key)) for key in MOMENTS}
            if self._ranks.rank == 0:
                state[i] = {"step": torch.tensor(steps[0]), **moments}
        blank = [torch.nn.Parameter(torch.empty(0)) for _ in self._parameters]
        of_torch = torch.optim.AdamW(blank, **hyperparameters(self._config, self._config.lr), fused=True)
        return {"state": state, "param_groups": of_torch.state_dict()["param_groups"]}

    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `model_state`; every rank has the whole state."""
        from deepspeed.utils import safe_set_full_fp32_param

        for name, parameter in self._model.named_parameters():
            if name in state:
                with self._whole(parameter, change=True):
                    parameter.data.copy_(state[name])
        self._engine.optimizer.refresh_fp32_params()
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                safe_set_full_fp32_param(parameter, state[name].to(parameter.device))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; every rank has the whole state."""
        from deepspeed.utils import safe_set_full_optimizer_state

        if not state["state"]:
            return
        for of_shard in self._shards():
            step = state["state"][0]["step"].clone()
            self._inner.state[of_shard] = {"step": step, **{key: torch.zeros_like(of_shard) for key in MOMENTS}}
        self._link()
        for i, parameter in enumerate(self._parameters):
            for key in MOMENTS:
                safe_set_full_optimizer_state(parameter, state["state"][i][key].to(parameter.device), key)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """torch's AdamW, whose parameters are flat shards."""
        inner: torch.optim.Optimizer = self._engine.optimizer.optimizer
        return inner

    def _shards(self) -> list[Tensor]:
        groups = self._engine.optimizer
        flat: list[Tensor] = (
            groups.fp32_partitioned_groups_flat if self._sharded else groups.single_partition_of_fp32_groups
        )
        return flat

    def _link(self) -> None:
        """Let DeepSpeed know of the optimizer's state, as it does after the first step."""
        if not self._sharded:
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _kept(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().clone() if self._ranks.rank == 0 else torch.empty(0)

    def _whole(self, parameter: torch.nn.Parameter, change: bool = False) -> Any:
        return self._deepspeed.zero.GatheredParameters(
            [parameter], modifier_rank=0 if change else None, enabled=self._sharded
        )


def _settings(config: TrainerConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.zero.stage, **config.zero.settings}
    if config.zero.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if config.zero.offload_weights:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # of what it counts by itself; ours are told to it one by one
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.grad_clip,
        "steps_per_print": 1 << 30,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # its own AdamW would be compiled first, for minutes
        "bf16": {"enabled": config.zero.bfloat16},
    }


def _deepspeed() -> ModuleType:
    """DeepSpeed, with a process group, and without the extensions that it would compile on the way."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise UserError(
            f"trainer.backend deepspeed: {error}.", "pip install 'rollstream[deepspeed]', or take backend torch."
        ) from error
    if on_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not torch.distributed.is_initialized():
        from torch.distributed import HashStore  # type: ignore[attr-defined]  # its __all__ leaves it out

        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo" if on_cpu else "nccl", auto_mpi_discovery=False)
    return deepspeed  # type: ignore[no-any-return]
