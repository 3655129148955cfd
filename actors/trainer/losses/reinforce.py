"""REINFORCE with the behaviour weight."""

from torch import Tensor

from actors.trainer.losses.base import PolicyLoss, bounded_exp, weighted


def reinforce(logprobs: Tensor, proximal: Tensor, advantages: Tensor, *, weight: Tensor | None = None) -> PolicyLoss:
    """The policy gradient itself; nothing is clipped but the behaviour weight `weight`, bounded by a correction.

    ```
    total = Σ −weight·A·θ
    ```
    `proximal` is for the ratio that is reported. With several mini-batches in a step nothing keeps the later ones near
    the proximal policy: take one, or a clipped loss.

    Sources: Williams 1992; with truncated weights IMPALA 1802.01561 and PipelineRL 2509.19128.
    """
    return weighted(-advantages * logprobs, bounded_exp(logprobs.detach() - proximal), weight)
