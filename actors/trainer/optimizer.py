"""AdamW with a schedule, a bound on the gradient's norm, and a loud refusal of gradients that are not finite."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.trainer.config import TrainerConfig
from actors.trainer.ranks import OneRank, Ranks

log = structlog.get_logger(__name__)
T = TypeVar("T")


def schedule(step: int, config: TrainerConfig) -> float:
    """The share of `lr` that step `step` uses: linear warm-up, times linear decay to `min_lr_ratio` if asked for."""
    warm_up = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.decay_steps == 0:
        return warm_up
    done = min(1.0, step / config.decay_steps)
    return warm_up * (1.0 - (1.0 - config.min_lr_ratio) * done)


def hyperparameters(config: TrainerConfig, lr: float) -> dict[str, Any]:
    """The arguments of torch's AdamW."""
    return {"lr": lr, "betas": config.betas, "eps": config.adam_eps, "weight_decay": config.weight_decay}


class Optimizer:
    """The optimizer of some parameters. `lr` is the highest learning rate; the rest is the trainer's config.

    With several `ranks` the gradients are summed over them, so that each takes the same step on its own copy.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], config: TrainerConfig, lr: float, ranks: Ranks | None = None
    ) -> None:
        self._config = config
        self._ranks = ranks or OneRank()
        self._lr = lr
        self._parameters = [p for p in parameters if p.requires_grad]
        self._hyperparameters = hyperparameters(config, lr)
        self.adam = torch.optim.AdamW(self._parameters, **self._hyperparameters, fused=True)

    def schedule(self, step: int) -> float:
        """Set the learning rate of training step `step`, and return it."""
        lr = self._lr * schedule(step, self._config)
        for group in self.adam.param_groups:
            group["lr"] = lr
        return lr

    def update(self, step: int) -> float:
        """One optimizer step on the accumulated gradients; returns their global norm before clipping, or skips the
        step, loudly, and returns what was not finite."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self._ranks.add(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        value = float(norm)
        if np.isfinite(value):
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.grad_clip, norm)
            self.adam.step()
        else:
            log.warning("optimizer_step_skipped", step=step, grad_norm=value, reason="the gradient is not finite")
        self.adam.zero_grad(set_to_none=True)
        return value

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state. Tensors are not copied."""
        return self.adam.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`, but with the hyperparameters of this config."""
        self.adam.load_state_dict(dict(state))
        for group in self.adam.param_groups:  # torch takes these from the state too, in silence
            group |= self._hyperparameters


class PolicyOptimizer(Protocol):
    """The policy's weights and their optimizer; `WholeOptimizer` or `zero.ZeroOptimizer`.

    With several ranks all call the same methods in the same order.
    """

    def forward(self, call: Callable[[PreTrainedModel], T]) -> T:
        """What `call` makes of the model."""

    def backward(self, total: Tensor, last: bool) -> None:
        """Add the gradient of `total`; `last`: of this optimizer step."""

    def schedule(self, step: int) -> float:
        """Set the learning rate of training step `step`, and return it."""

    def update(self, step: int) -> float:
        """One optimizer step on the gradients of all ranks; returns their global norm before clipping."""

    def weights(self, dtype: torch.dtype, trained: bool = False) -> dict[str, Tensor]:
        """On rank 0 the weights by name, in `dtype`, tied ones as one tensor; empty elsewhere.

        `trained`: only those that are not frozen.
        """

    def model_state(self) -> dict[str, Any]:
        """The weights by name in float32, whole; on rank 0 at least. If some are frozen, the others."""

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `model_state`."""

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, as torch's AdamW has it; on rank 0 at least."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`, but with the hyperparameters of this config."""


class WholeOptimizer(Optimizer):
    """A whole model on each rank."""

    def __init__(self, model: PreTrainedModel, config: TrainerConfig, ranks: Ranks) -> None:
        super().__init__(model.parameters(), config, config.lr, ranks)
        self._model = model

    def forward(self, call: Callable[[PreTrainedModel], T]) -> T:
        """See `PolicyOptimizer`."""
        return call(self._model)

    def backward(self, total: Tensor, last: bool) -> None:
        """See `PolicyOptimizer`."""
        total.backward()  # type: ignore[no-untyped-call]

    def weights(self, dtype: torch.dtype, trained: bool = False) -> dict[str, Tensor]:
        """See `PolicyOptimizer`; of the dtype that they have they are not copied."""
        if self._ranks.rank:
            return {}
        cast: dict[int, Tensor] = {}  # by memory, so that tied tensors stay one
        state = self.model_state() if trained else self._model.state_dict()
        return {key: cast.setdefault(value.data_ptr(), value.detach().to(dtype)) for key, value in state.items()}

    def model_state(self) -> dict[str, Any]:
        """The model's own; tensors are not copied."""
        frozen = frozen_names(self._model)
        return {name: tensor for name, tensor in self._model.state_dict().items() if not frozen or name not in frozen}

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        """See `PolicyOptimizer`."""
        self._model.load_state_dict(state, strict=not frozen_names(self._model))


def frozen_names(model: PreTrainedModel) -> set[str]:
    """The weights that are not trained, buffers among them; empty if all parameters are trained."""
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    if all(parameter.requires_grad for parameter in model.parameters()):
        return set()
    return set(model.state_dict()) - trained
