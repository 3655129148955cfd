"""Estimators of the KL divergence from the tokens of one policy. Shapes: n = trained tokens, flat."""

import torch
from torch import Tensor

from actors.trainer.config import KlEstimator

KL_CLAMP = 10.0


def kl(x: Tensor, b: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate [n] of KL(x ‖ b) from tokens sampled by x, clamped to ±10.

    ```
    k1 = x − b;  k2 = (x − b)²/2;  k3 = exp(b − x) − 1 − (b − x)
    ```
    As a penalty in the loss only k2 and k3 have a gradient towards b: that of k1 does not even depend on b.
    Source: http://joschu.net/blog/kl-approx.html.
    """
    return kl_unclamped(x - b, estimator).clamp(-KL_CLAMP, KL_CLAMP)


def kl_unclamped(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """As `kl`, of the difference x − b [n], without the clamp: what thresholds are compared with."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(-log_ratio) + log_ratio
