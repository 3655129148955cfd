"""CISPO: the importance weight is clipped, not the update, so that no token falls silent."""

from torch import Tensor

from actors.trainer.losses.base import PolicyLoss, bounded_exp, weighted


def cispo(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    clip_high: float,
    weight: Tensor | None = None,
) -> PolicyLoss:
    """REINFORCE with a truncated importance weight.

    ```
    r = exp(θ − behav);  total = Σ −weight·sg[min(r, 1 + clip_high)]·A·θ
    ```
    sg stops the gradient. There is no lower bound: a token that became unlikely has a small weight by itself.

    Source: MiniMax-M1 2506.13585.
    """
    r = bounded_exp(logprobs.detach() - behaviour)
    truncated = r.clamp(max=1 + clip_high)
    return weighted(-truncated * advantages * logprobs, r, weight, clipped=r > truncated)
