"""How the losses of tokens become the loss of a mini-batch: the weight of a token, relative to the mean over tokens."""

from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_scales(how: Aggregation, lengths: npt.ArrayLike, max_new_tokens: int | None) -> Floats | None:
    """What to multiply the loss of each token with, float64 [S], one number a sequence, before dividing by N = Σ L.

    `lengths` int [S] are the trained tokens L of each sequence of the mini-batch, masked ones included; 0 is allowed.
    ```
    token_mean     Σ_tokens / N                          None: nothing to multiply with
    sequence_mean  mean over sequences of mean over tokens    N / (S·L)
    constant       Σ_tokens / (S·max_new_tokens)              N / (S·max_new_tokens)
    ```
    S counts sequences with trained tokens. Sources: DAPO 2503.14476 (token mean); GRPO 2402.03300, GSPO and SAPO
    (sequence mean, which favours short answers that are right and long ones that are wrong); Dr.GRPO 2503.20783
    (constant, which favours neither).
    """
    if how == "token_mean":
        return None
    tokens = np.asarray(lengths, dtype=np.float64)
    total, present = tokens.sum(), max(int((tokens > 0).sum()), 1)
    if how == "sequence_mean":
        return np.where(tokens > 0, total / present / np.maximum(tokens, 1), 0.0)
    if max_new_tokens is None:
        raise ValueError("aggregation constant needs max_new_tokens, which the loss is divided by")
    return np.full(len(tokens), total / present / max_new_tokens)
