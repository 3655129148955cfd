"""What every policy loss takes and gives, and the clipped surrogate that two of them share.

Shapes: n = trained tokens of a micro-batch, flat and without padding, so that no function needs a mask; S = its
sequences. All inputs are floating point [n] on one device. Losses are *sums* over the tokens: the caller divides by N,
the trained tokens of the whole optimizer mini-batch, masked ones included.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_CLAMP = 20.0  # exp(20) is far outside any clip; beyond ~88 float32 overflows and 0·inf makes a NaN gradient


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of a micro-batch, as a policy loss sees them. Only `logprobs` carries a gradient."""

    logprobs: Tensor  # θ, the policy that is being changed
    proximal: Tensor  # what ratios are taken to: the weights before this step; for coupled losses the behaviour policy
    behaviour: Tensor  # the policy that sampled; finite
    advantages: Tensor
    weight: Tensor | None  # multiply each token's loss by it: correction, masks, aggregation; None: 1 for all
    sequence: Tensor  # int64, each token's sequence, in [0, sequences)
    sequences: int


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss with what it clipped."""

    total: Tensor  # scalar: the sum over tokens, differentiable
    ratio: Tensor  # [n] u = exp(θ − prox), detached
    clipped: Tensor  # bool [n]: the clipped branch was taken (tokens of weight 0 do not count)
    dual_clipped: Tensor  # bool [n]


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio that may be anything, finite in float32 together with its gradient."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def clipped_surrogate(
    u: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    clip_high: float | None,
    dual_clip: float | None,
    weight: Tensor | None,
) -> PolicyLoss:
    """`Σ weight·max(−A·u, −A·clamp(u, 1 − clip, 1 + clip_high))`, and for A < 0 at most `dual_clip·|A|` a token."""
    bounded = u.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    plain, pessimistic = -advantages * u, -advantages * bounded
    pg = torch.maximum(plain, pessimistic)
    clipped = plain.detach() < pessimistic.detach()
    dual_clipped = torch.zeros_like(clipped)
    if dual_clip is not None:
        ceiling = dual_clip * advantages.abs()
        dual_clipped = (advantages < 0) & (pg.detach() > ceiling)
        pg = torch.where(dual_clipped, ceiling, pg)
    if weight is not None:
        pg = weight * pg
        clipped, dual_clipped = clipped & (weight != 0), dual_clipped & (weight != 0)
    return PolicyLoss(pg.sum(), u.detach(), clipped, dual_clipped)


def weighted(terms: Tensor, ratio: Tensor, weight: Tensor | None, clipped: Tensor | None = None) -> PolicyLoss:
    """The loss `Σ weight·terms` of a function that clips nothing, or only where `clipped` says so."""
    none = torch.zeros_like(terms, dtype=torch.bool)
    clipped = none if clipped is None else clipped
    if weight is not None:
        terms, clipped = weight * terms, clipped & (weight != 0)
    return PolicyLoss(terms.sum(), ratio.detach(), clipped, none)
