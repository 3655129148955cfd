"""Rewards to advantages: bias, scale, clip, then normalisation by group or batch, in float64.

Shapes: B samples; n values, which are samples or tokens. Groups are told by id, never by position.
"""

import numpy as np
import numpy.typing as npt

from actors.trainer.config import Level, TrainerConfig

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

EQUAL_REWARDS = 1e-6  # 0.1 + 0.2 is not 0.3: rewards that differ by less count as equal


def shape_rewards(rewards: npt.ArrayLike, *, bias: float, scale: float, clip: float | None) -> Floats:
    """`clip((r + bias)·scale, ±clip)`; rewards [B] -> float64 [B]. `clip` None clips nothing. Source: AReaL."""
    shaped = (np.asarray(rewards, dtype=np.float64) + bias) * scale
    return shaped if clip is None else np.clip(shaped, -clip, clip)


def zero_variance(rewards: npt.ArrayLike, group_ids: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which samples belong to a group whose rewards are all equal (within `EQUAL_REWARDS`); [B], [B] -> bool [B]."""
    x = np.asarray(rewards, dtype=np.float64)
    group = _dense(group_ids)
    low, high = np.full(len(x), np.inf), np.full(len(x), -np.inf)
    np.minimum.at(low, group, x)
    np.maximum.at(high, group, x)
    equal: npt.NDArray[np.bool_] = (high - low) < EQUAL_REWARDS
    return equal[group]


def normalise(
    values: npt.ArrayLike,
    group_ids: npt.ArrayLike,
    *,
    mean: Level = "group",
    std: Level = "group",
    leave_one_out: bool = False,
    eps: float = 1e-5,
    unbiased: bool = True,
    owners: npt.ArrayLike | None = None,
) -> Floats:
    """`(x − mean) / (std + eps)`, values [n], group_ids [n] -> float64 [n].

    `mean` none subtracts nothing, `std` none divides by 1. The standard deviation is taken around the mean chosen, over
    n−1 values (`unbiased`) or n. `leave_one_out` compares each value with the mean of the others, (S − x)/(n − 1); of
    values that share one of the `owners` [n], as the steps of a sample do, with the mean of those of other owners.
    A group of one, or a group or batch whose values are all equal, has exactly 0 where its own mean is subtracted, and
    a group of one has 0 where its own std divides: neither says anything about its values.

    Sources: AReaL's `Normalization`; GRPO 2402.03300, Dr.GRPO 2503.20783, LitePPO 2508.08221, RLOO 2402.14740.
    """
    x = np.asarray(values, dtype=np.float64)
    group = _dense(group_ids)
    silent = np.zeros(len(x), dtype=np.bool_)
    if mean == "group":
        silent |= zero_variance(x, group)
    elif mean == "batch" and len(x):
        silent |= zero_variance(x, np.zeros_like(group))
    if std == "group":
        silent |= np.bincount(group)[group] == 1

    deviation = x
    if mean != "none":
        others = None if not leave_one_out else np.arange(len(x)) if owners is None else _dense(owners)
        deviation = x - _mean(x, _cells(mean, group), others)
    scale = 1.0 if std == "none" else _std(deviation, _cells(std, group), unbiased) + eps
    return np.where(silent, 0.0, deviation / scale)


def of_batch(rewards: npt.ArrayLike, group_ids: npt.ArrayLike, config: TrainerConfig) -> tuple[Floats, Floats]:
    """Shaped rewards and advantages of a training batch as the config says; [B], [B] -> float64 [B], float64 [B]."""
    shaped = shape_rewards(rewards, bias=config.reward_bias, scale=config.reward_scale, clip=config.reward_clip)
    how = config.advantage
    advantages = normalise(shaped, group_ids, mean=how.mean, std=how.std, leave_one_out=how.leave_one_out, eps=how.eps)
    return shaped, advantages


def _dense(group_ids: npt.ArrayLike) -> Ids:
    return np.unique(np.asarray(group_ids), return_inverse=True)[1].reshape(-1).astype(np.int64)


def _cells(level: Level, group: Ids) -> Ids:
    """Which values share a statistic: those of a group, or all."""
    return group if level == "group" else np.zeros_like(group)


def _mean(x: Floats, cell: Ids, owner: Ids | None) -> Floats:
    """Of the values of a cell, without those of the value's own owner if there are owners."""
    total, count = np.bincount(cell, weights=x)[cell], np.bincount(cell)[cell]
    if owner is not None:
        own, n = np.bincount(owner, weights=x)[owner], np.bincount(owner)[owner]
        return np.where(count > n, (total - own) / np.maximum(count - n, 1), x)
    return total / count


def _std(deviation: Floats, cell: Ids, unbiased: bool) -> Floats:
    squares, count = np.bincount(cell, weights=deviation**2), np.bincount(cell)
    std: Floats = np.sqrt(squares / np.maximum(count - int(unbiased), 1))
    return std[cell]
