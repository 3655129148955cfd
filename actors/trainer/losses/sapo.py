"""SAPO: a soft gate in the place of the clip."""

import torch
from torch import Tensor

from actors.trainer.losses.base import PolicyLoss, bounded_exp, weighted
from actors.trainer.sequences import per_sequence


def sapo(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    weight: Tensor | None = None,
) -> PolicyLoss:
    """The gated advantage of single tokens.

    ```
    r = exp(θ − behav);  g = 4/τ·σ(τ·(r − 1)), τ = tau_positive if A > 0 else tau_negative
    total = Σ −weight·g·A
    ```
    At r = 1 the gradient is that of the plain ratio; far from it fades out instead of being cut off.

    Source: SAPO 2511.20347.
    """
    r = bounded_exp(logprobs - behaviour)
    return weighted(-_gate(r, advantages, tau_positive, tau_negative) * advantages, r, weight)


def sapo_sequence(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    sequences: int,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    weight: Tensor | None = None,
) -> PolicyLoss:
    """As `sapo`, with the geometric mean ratio and the mean advantage of the whole sequence, as in GSPO.

    ```
    r_i = exp(mean_t(θ − behav));  A_i = mean_t(A);  total = Σ_i Σ_t −weight_t·g(r_i)·A_i
    ```
    """
    r = bounded_exp(per_sequence(logprobs - behaviour, sequence, sequences, "mean"))[sequence]
    advantage = per_sequence(advantages, sequence, sequences, "mean")[sequence]
    return weighted(-_gate(r, advantage, tau_positive, tau_negative) * advantage, r, weight)


def _gate(r: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    tau = torch.full_like(r, tau_negative).masked_fill(advantages > 0, tau_positive)
    return 4 / tau * torch.sigmoid(tau * (r - 1))
