"""Policy losses and KL estimators: pure functions of log-probabilities.

Shapes: n = trained tokens of a micro-batch, flat and without padding, so that no function needs a mask. All inputs are
float32 [n] on one device. Losses are *sums* over the tokens: the caller divides by N, the trained tokens of the whole
optimizer mini-batch.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KL_CLAMP = 10.0
LOG_RATIO_CLAMP = 20.0  # exp(20) is far outside any clip; beyond ~88 float32 overflows and 0·inf makes a NaN gradient


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss with what it clipped."""

    total: Tensor  # scalar: the sum over tokens, differentiable
    ratio: Tensor  # [n] u = exp(θ − prox), detached
    clipped: Tensor  # bool [n]: the clipped branch was taken (tokens of weight 0 do not count)
    dual_clipped: Tensor  # bool [n]


def ppo(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    weight: Tensor | None = None,
) -> PolicyLoss:
    """PPO with a clipped surrogate; with `weight`, decoupled PPO.

    ```
    u = exp(θ − prox);  pg = max(−A·u, −A·clamp(u, 1 − clip, 1 + clip_high))
    A < 0 and dual_clip: pg = min(pg, dual_clip·|A|)
    total = Σ weight·pg
    ```
    `weight` [n] is the detached behaviour weight of `corrections.behaviour_weight`. Naive asynchronous PPO passes the
    behaviour logprobs as `proximal` and no weight. Gradient flows through `logprobs` only.

    Sources: PPO 1707.06347; dual clip 1912.09729; clip-higher DAPO 2503.14476; decoupled 2110.00641 and AReaL
    2505.24298 eq. 5.
    """
    u = (logprobs - proximal.detach()).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
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


def kl(x: Tensor, b: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate [n] of KL(x ‖ b) from tokens sampled by x, clamped to ±10.

    ```
    k1 = x − b;  k2 = (x − b)²/2;  k3 = exp(b − x) − 1 − (b − x)
    ```
    Source: http://joschu.net/blog/kl-approx.html.
    """
    return kl_unclamped(x - b, estimator).clamp(-KL_CLAMP, KL_CLAMP)


def kl_unclamped(log_ratio: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """As `kl`, of the difference x − b [n], without the clamp: what thresholds are compared with."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(-log_ratio) + log_ratio
