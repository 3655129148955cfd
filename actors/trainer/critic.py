"""The critic: the policy's architecture with a head of one number, its own weights and its own optimizer."""

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.trainer.config import CriticConfig, TrainerConfig
from actors.trainer.forward import MicroBatch, autocast_context, model_inputs
from actors.trainer.optimizer import Optimizer
from actors.trainer.ranks import Ranks
from actors.trainer.value_loss import ValueLoss, value_loss
from schemas.errors import UserError


class Critic:
    """A value model that begins with the policy's weights and a head of zeros, so with the value 0 everywhere.

    It lies whole on every rank, and its gradients are summed over them, also where the policy lies in shards; so it is
    made before that is put into shards.

    V(t) is asked at the position that predicts token t: what is still to come, before that token is chosen.
    Raises `UserError` for a model whose head cannot be taken off.
    """

    def __init__(
        self, policy: PreTrainedModel, config: TrainerConfig, section: CriticConfig, ranks: Ranks | None = None
    ) -> None:
        if policy.base_model is policy:
            raise UserError(
                f"A critic needs the body of {type(policy).__name__}, which does not tell it from its head.",
                "Take an algorithm without a critic, such as trainer.algorithm: grpo.",
            )
        self._config, self._trainer, self._ranks = section, config, ranks
        self._prefix = f"{policy.base_model_prefix}."  # of the trunk's weights among the policy's
        self._autocast = torch.bfloat16 if config.autocast == "bfloat16" else None
        self.trunk = cast(PreTrainedModel, copy.deepcopy(policy.base_model))
        self.trunk.train(False)
        self.trunk.requires_grad_(True)
        width = policy.config.get_text_config().hidden_size
        self.head_weight = torch.nn.Parameter(torch.zeros(width, device=policy.device))
        self.head_bias = torch.nn.Parameter(torch.zeros((), device=policy.device))
        self.optimizer = self._fresh_optimizer()

    def _fresh_optimizer(self) -> Optimizer:
        trained = [*self.trunk.parameters(), self.head_weight, self.head_bias]
        return Optimizer(trained, self._trainer, self._config.lr or self._trainer.lr, self._ranks)

    def begin(self, policy: Mapping[str, Tensor]) -> None:
        """Begin anew with the policy's weights, whole and by name, and a head of zeros."""
        self.trunk.load_state_dict({name: policy[self._prefix + name] for name in self.trunk.state_dict()})
        self.head_weight.data.zero_()
        self.head_bias.data.zero_()
        self.optimizer = self._fresh_optimizer()

    def values(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Values float32 [n] before each scored token, and [S] behind the last token of each sequence."""
        with autocast_context(self.trunk, self._autocast):
            hidden = self.trunk(**model_inputs(self.trunk, batch)).last_hidden_state.flatten(0, 1)
        places = torch.cat([batch.predictors, batch.ends])
        values = hidden.index_select(0, places).float() @ self.head_weight + self.head_bias
        return values[: len(batch.predictors)], values[len(batch.predictors) :]

    def loss(self, batch: MicroBatch, old_values: Tensor, returns: Tensor) -> ValueLoss:
        """See `value_loss`; the sum over the scored tokens of one micro-batch, all inputs float32 [n]."""
        values, _ = self.values(batch)
        config = self._config
        return value_loss(
            values, old_values, returns, clip=config.clip, kind=config.loss, huber_delta=config.huber_delta
        )

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer. Tensors are not copied."""
        return {
            "trunk": self.trunk.state_dict(),
            "head": {"weight": self.head_weight.data, "bias": self.head_bias.data},
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.trunk.load_state_dict(state["trunk"])
        self.head_weight.data.copy_(state["head"]["weight"])
        self.head_bias.data.copy_(state["head"]["bias"])
        self.optimizer.load_state_dict(state["optimizer"])
