"""Generalised advantage estimation on padded rows, in float64. Shapes: B sequences, T positions."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def gae(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    mask: npt.ArrayLike,
    last_values: npt.ArrayLike,
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[Floats, Floats]:
    """Advantages and returns, float64 [B, T] each, from right to left.

    ```
    δ = r_t + γ·V_next − V_t;  A = A·(1 − m) + (δ + γλA)·m;  V_next = V_next·(1 − m) + V_t·m;  return = A + V_t
    ```
    Masked positions (m = 0: a tool's tokens, padding) are transparent: they do not discount, and carry the advantage of
    what follows. Without a critic all values are 0. `last_values` [B] is the value behind the last token: 0 for an
    answer that ended, the critic's opinion for one that was cut.

    Sources: 1506.02438; AReaL, whose masks are these.
    """
    r, v, m = (np.asarray(x, dtype=np.float64) for x in (rewards, values, mask))
    advantages = np.zeros_like(r)
    carried = np.zeros(len(r))
    v_next = np.asarray(last_values, dtype=np.float64)
    for t in range(r.shape[1] - 1, -1, -1):
        trained = m[:, t] != 0
        delta = r[:, t] + discount * v_next - v[:, t]
        carried = np.where(trained, delta + discount * gae_lambda * carried, carried)
        v_next = np.where(trained, v[:, t], v_next)
        advantages[:, t] = carried
    return advantages, advantages + v
