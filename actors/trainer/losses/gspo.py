"""GSPO: one ratio for the whole sequence, so that clipping takes or leaves whole answers."""

from torch import Tensor

from actors.trainer.losses.base import PolicyLoss, bounded_exp, clipped_surrogate
from actors.trainer.sequences import per_sequence


def gspo(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    sequences: int,
    *,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    weight: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate of the geometric mean ratio; the sum over a sequence's tokens counts it once a token.

    ```
    u_i = exp(mean_t(θ − prox));  A_i = mean_t(A)
    total = Σ_i Σ_t weight_t·max(−A_i·u_i, −A_i·clamp(u_i, 1 − clip, 1 + clip_high))
    ```
    Means are over the trained tokens of sequence i. Ratios of whole sequences lie much nearer to 1 than those of
    tokens: the paper clips at 3e-4 and 4e-4. With aggregation `sequence_mean` each sequence counts once, as there.

    Source: GSPO 2507.18071.
    """
    log_ratio = per_sequence(logprobs - proximal.detach(), sequence, sequences, "mean")
    advantage = per_sequence(advantages, sequence, sequences, "mean")
    u = bounded_exp(log_ratio)[sequence]
    return clipped_surrogate(u, advantage[sequence], clip=clip, clip_high=clip_high, dual_clip=dual_clip, weight=weight)
