"""Policy losses by the names that a recipe uses, one file each, and those of the user's own.

A loss of the user's is a function `loss(tokens: LossInputs, config: TrainerConfig) -> Tensor | PolicyLoss` in a file of
his own, which the recipe names as `trainer.loss: my_loss.py:loss`. It returns the sum over tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actors.functions import load_function
from actors.trainer.config import COUPLED_LOSSES, LOSSES, TrainerConfig
from actors.trainer.losses.base import LossInputs, PolicyLoss, bounded_exp
from actors.trainer.losses.cispo import cispo
from actors.trainer.losses.gspo import gspo
from actors.trainer.losses.ppo import ppo
from actors.trainer.losses.reinforce import reinforce
from actors.trainer.losses.sapo import sapo, sapo_sequence
from actors.trainer.own import call
from schemas.errors import UserError

__all__ = ["Loss", "LossInputs", "PolicyLoss", "load_loss"]

LossFunction = Callable[[LossInputs, TrainerConfig], PolicyLoss]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as the learner uses it. A coupled one takes its ratios to the behaviour policy, and no weight for it."""

    function: LossFunction
    coupled: bool


def load_loss(name: str, base: Path | None = None) -> Loss:
    """The loss that a recipe names; a file is looked for in `base`. Raises `UserError` if there is none."""
    if name in _BUILT_IN:
        return Loss(_BUILT_IN[name], name in COUPLED_LOSSES)
    function = load_function(name, base, builtins=LOSSES)

    def own(tokens: LossInputs, config: TrainerConfig) -> PolicyLoss:
        return _checked(name, call(f"The loss {name}", function, tokens, config), tokens)

    return Loss(own, coupled=False)


def _checked(name: str, result: object, tokens: LossInputs) -> PolicyLoss:
    if isinstance(result, PolicyLoss):
        return result
    if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
        raise UserError(
            f"The loss {name} returned {_describe(result)}.",
            "It must return one number with a gradient: the sum over tokens of a function of tokens.logprobs.",
        )
    none = torch.zeros_like(tokens.logprobs, dtype=torch.bool)
    ratio = bounded_exp(tokens.logprobs.detach() - tokens.proximal)
    return PolicyLoss(result.reshape(()), ratio, none, none)


def _describe(result: object) -> str:
    if not isinstance(result, Tensor):
        return f"a {type(result).__name__}"
    return f"a tensor of shape {list(result.shape)}{'' if result.requires_grad else ' without gradient'}"


def _ppo(t: LossInputs, c: TrainerConfig) -> PolicyLoss:
    return ppo(
        t.logprobs,
        t.proximal,
        t.advantages,
        clip=c.clip,
        clip_high=c.clip_high,
        dual_clip=c.dual_clip,
        weight=t.weight,
    )


def _gspo(t: LossInputs, c: TrainerConfig) -> PolicyLoss:
    return gspo(
        t.logprobs,
        t.proximal,
        t.advantages,
        t.sequence,
        t.sequences,
        clip=c.clip,
        clip_high=c.clip_high,
        dual_clip=c.dual_clip,
        weight=t.weight,
    )


def _sapo(t: LossInputs, c: TrainerConfig) -> PolicyLoss:
    positive, negative = c.sapo_tau
    return sapo(t.logprobs, t.behaviour, t.advantages, tau_positive=positive, tau_negative=negative, weight=t.weight)


def _sapo_sequence(t: LossInputs, c: TrainerConfig) -> PolicyLoss:
    positive, negative = c.sapo_tau
    return sapo_sequence(
        t.logprobs,
        t.behaviour,
        t.advantages,
        t.sequence,
        t.sequences,
        tau_positive=positive,
        tau_negative=negative,
        weight=t.weight,
    )


def _cispo(t: LossInputs, c: TrainerConfig) -> PolicyLoss:
    clip_high = c.clip if c.clip_high is None else c.clip_high
    return cispo(t.logprobs, t.behaviour, t.advantages, clip_high=clip_high, weight=t.weight)


def _reinforce(t: LossInputs, c: TrainerConfig) -> PolicyLoss:
    return reinforce(t.logprobs, t.proximal, t.advantages, weight=t.weight)


_BUILT_IN: dict[str, LossFunction] = {
    "decoupled_ppo": _ppo,
    "ppo": _ppo,
    "gspo": _gspo,
    "sapo": _sapo,
    "sapo_sequence": _sapo_sequence,
    "cispo": _cispo,
    "reinforce": _reinforce,
}
