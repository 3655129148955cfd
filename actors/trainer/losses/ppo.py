"""PPO, decoupled or not: the clipped surrogate of single tokens."""

from torch import Tensor

from actors.trainer.losses.base import PolicyLoss, bounded_exp, clipped_surrogate


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
    u = bounded_exp(logprobs - proximal.detach())
    return clipped_surrogate(u, advantages, clip=clip, clip_high=clip_high, dual_clip=dual_clip, weight=weight)
