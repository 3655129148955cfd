"""The loss of a critic: how far its values are from the returns."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The loss with what it clipped."""

    total: Tensor  # scalar: the sum over tokens, differentiable
    clipped: Tensor  # bool [n]: the clipped branch was taken


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float | None = 0.5,
    kind: Literal["mse", "huber"] = "mse",
    huber_delta: float = 10.0,
) -> ValueLoss:
    """The clipped value loss; all inputs [n], of which only `values` carries a gradient.

    ```
    total = Σ max(l(v − ret), l(clamp(v, v_old ± clip) − ret))
    mse: l(x) = x²/2;  huber: the same within ±δ, δ·(|x| − δ/2) beyond
    ```
    The maximum means that a value that has moved by more than `clip` since before the step is pushed on only if it has
    moved away from the return. `old_values` are those before the step, for all mini-batches.

    Sources: PPO's implementation, 2005.12729; AReaL, with ε = 0.5.
    """
    plain = _distance(values - returns, kind, huber_delta)
    if clip is None:
        return ValueLoss(plain.sum(), torch.zeros_like(plain, dtype=torch.bool))
    bounded = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    pessimistic = _distance(bounded - returns, kind, huber_delta)
    return ValueLoss(torch.maximum(plain, pessimistic).sum(), plain.detach() < pessimistic.detach())


def _distance(x: Tensor, kind: Literal["mse", "huber"], delta: float) -> Tensor:
    squares = x.square() / 2
    if kind == "mse":
        return squares
    return torch.where(x.abs() <= delta, squares, delta * (x.abs() - delta / 2))
