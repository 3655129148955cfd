"""Credit by turns: what a turn is worth is what it earned and, discounted, what came of it. In float64, no torch.

Shapes: B samples; K_i turns of sample i, T_i its response tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actors.trainer.advantages import normalise
from actors.trainer.config import TrainerConfig
from actors.trainer.samples import TrainSample

Floats = npt.NDArray[np.float64]


def discounted_returns(rewards: npt.ArrayLike, discount: float) -> Floats:
    """Returns of turns, float64 [K], of their rewards [K] and the `discount` γ per turn.

    ```
    G_k = r_k + γ·G_{k+1};  G_K = r_K
    ```
    Source: AReaL's `InteractionCache.apply_reward_discount`.
    """
    returns = np.array(rewards, dtype=np.float64)
    for k in range(len(returns) - 2, -1, -1):
        returns[k] += discount * returns[k + 1]
    return returns


def ends_of_turns(sample: TrainSample) -> npt.NDArray[np.int64]:
    """The last tokens of what is given credit as a turn, int64 [K], ascending; the last one is that of the response.

    They are the steps that were rewarded, if the reward tells steps, else the runs of tokens that the model made.
    """
    ends = sample.turn_ends if sample.step_ends is None else np.asarray(sample.step_ends, np.int64)
    if not len(ends):
        return np.array([len(sample.tokens) - 1])
    made = np.flatnonzero(sample.made)
    if len(made) and made[-1] > ends[-1]:  # a step of reward 0 that nobody named
        return np.append(ends, len(sample.tokens) - 1)
    return np.append(ends[:-1], len(sample.tokens) - 1)


def order_of_turns(sample: TrainSample, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Places of the turns that end at `ends`, int64 [K], in the order in which they were asked.

    Where an agent branches, that of its tokens is another: a sequence stands where its last turn belongs. Steps are in
    the order of the turns that they end in, or behind.
    """
    if sample.asked is None:
        return np.arange(len(ends))
    made = np.flatnonzero(sample.made)
    lasts, places = sample.asked.reshape(-1, 2).T
    last_made = made[np.searchsorted(made, ends, side="right") - 1]
    return np.argsort(places[np.searchsorted(lasts, last_made)], kind="stable")


def turn_advantages(
    samples: Sequence[TrainSample], final: Floats, discount: float, config: TrainerConfig
) -> list[Floats]:
    """The advantage of each token, [T_i]: the return of its turn, normalised over the turns of the group or batch.

    `final` [B] are the samples' shaped rewards, which the turns that were asked last earn beside their own; rewards of
    turns are scaled as rewards are. `advantage.mean`, `.std` and `.leave_one_out` say what is normalised over, as they
    do for steps (see `credit.process_rewards`). With one turn each this is the advantage of a sample.
    """
    ends = [ends_of_turns(sample) for sample in samples]
    returns = []
    for sample, of_turns, reward in zip(samples, ends, final, strict=True):
        earned = np.zeros(len(of_turns))
        if sample.token_rewards is not None:
            begins = np.append(0, of_turns[:-1] + 1)
            earned += config.reward_scale * np.add.reduceat(sample.token_rewards.astype(np.float64), begins)
        order = order_of_turns(sample, of_turns)
        earned[order[-1]] += reward
        of_sample = np.empty_like(earned)
        of_sample[order] = discounted_returns(earned[order], discount)
        returns.append(of_sample)
    counts = [len(of_turns) for of_turns in ends]
    owners = np.repeat(np.arange(len(samples)), counts)
    how = config.advantage
    advantages = normalise(
        np.concatenate([np.zeros(0), *returns]),
        np.array([s.group_id for s in samples], dtype=np.int64)[owners],
        mean=how.mean,
        std=how.std,
        leave_one_out=how.leave_one_out,
        eps=how.eps,
        owners=owners,
    )
    parts = np.split(advantages, np.cumsum(counts)[:-1]) if samples else []
    return [np.repeat(part, np.diff(of_turns, prepend=-1)) for part, of_turns in zip(parts, ends, strict=True)]
