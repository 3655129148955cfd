"""The behaviour weight ρ = exp(prox − behav), and the corrections that keep it in bounds.

Shapes: n = trained tokens of a micro-batch, flat; S = its sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.trainer.config import CorrectionConfig
from actors.trainer.kl import kl_unclamped
from actors.trainer.sequences import per_sequence


@dataclass(frozen=True, slots=True)
class Corrected:
    """The weights to multiply the loss with, and which tokens were changed."""

    weight: Tensor  # float32 [n], detached; 0 = masked
    changed: Tensor  # bool [n]: masked or clamped


def log_ratio(proximal: Tensor, behaviour: Tensor) -> Tensor:
    """prox − behav, float32 [n], detached; where that is not finite (an engine reported −inf or NaN) it is 0."""
    difference = proximal.detach().float() - behaviour.float()
    return torch.where(difference.isfinite(), difference, torch.zeros_like(difference))


def behaviour_weight(
    proximal: Tensor, behaviour: Tensor, sequence: Tensor, sequences: int, config: CorrectionConfig
) -> Corrected:
    """Weights for decoupled PPO; proximal, behaviour float32 [n], sequence int64 [n] in [0, `sequences`).

    ```
    token:     metric_t = ρ_t | k1_t | k2_t | k3_t,             weight = ρ_t
    sequence:  metric_s = exp(agg_t log ρ_t) for the ratio,     weight = exp(mean_t log ρ_t) for the ratio,
                          agg_t k_t otherwise                            ρ_t otherwise
    out of [lower, upper]:  mask → weight 0;  clamp → weight clamped to the bounds
    ```
    A ratio is aggregated in the log, so that long answers do not seem further off than short ones. The caller's
    denominator N still counts masked tokens. k = KL(prox ‖ behav) as in `kl.kl`, unclamped.

    Sources: AReaL's rejection sampling; verl's rollout correction (TIS, MIS); IcePop.
    """
    difference = log_ratio(proximal, behaviour)
    ratio = config.metric == "ratio"
    metric = difference if config.metric == "ratio" else kl_unclamped(difference, config.metric)
    weight = difference.exp()
    if config.level == "sequence":
        if ratio:
            weight = per_sequence(difference, sequence, sequences, "mean").exp()[sequence]
        metric = per_sequence(metric, sequence, sequences, config.aggregate)[sequence]
    if ratio:
        metric = metric.exp()

    outside = torch.zeros_like(metric, dtype=torch.bool)
    if config.lower is not None:
        outside |= metric < config.lower
    if config.upper is not None:
        outside |= metric > config.upper
    if config.action == "mask":
        return Corrected(weight.masked_fill(outside, 0.0), outside)
    if config.lower is None and config.upper is None:
        return Corrected(weight, outside)
    bounded = torch.where(outside, weight.clamp(config.lower, config.upper), weight)
    return Corrected(bounded, bounded != weight)
