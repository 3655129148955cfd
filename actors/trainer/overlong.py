"""DAPO's soft penalty on answers that come near the length at which they are cut."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def overlong_penalty(lengths: npt.ArrayLike, *, max_new_tokens: int, tail: float, factor: float) -> Floats:
    """What to add to each reward, float64 [B], never above 0; `lengths` [B] in response tokens.

    ```
    min(−(L − (max_new_tokens − tail)) / tail · factor, 0)
    ```
    `tail` is in tokens: the penalty begins `tail` before the limit and is `factor` at the limit.

    Source: DAPO 2503.14476, "soft overlong punishment".
    """
    over = np.asarray(lengths, dtype=np.float64) - (max_new_tokens - tail)
    return np.minimum(-over / tail * factor, 0.0)
