"""OPSM, off-policy sequence masking: bad answers that the policy has moved away from teach nothing good."""

from torch import Tensor

from actors.trainer.corrections import log_ratio
from actors.trainer.sequences import per_sequence


def off_policy_sequences(
    proximal: Tensor, behaviour: Tensor, advantages: Tensor, sequence: Tensor, sequences: int, threshold: float
) -> Tensor:
    """Which tokens to drop, bool [n]; all inputs float32 [n], `sequence` int64 [n].

    ```
    drop_t = A_t < 0 and mean over its sequence of (behav − prox) > threshold
    ```
    The mean is the k1 estimate of KL(behav ‖ prox), non-finite terms counting as 0. The caller's N still counts the
    dropped tokens.

    Source: DeepSeek-V3.2 2512.02556, "off-policy sequence masking".
    """
    divergence = per_sequence(-log_ratio(proximal, behaviour), sequence, sequences, "mean")
    return (advantages < 0) & (divergence > threshold)[sequence]
