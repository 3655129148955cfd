"""Credit assignment: from the rewards of samples to the advantages of their trained tokens, in float64.

penalise overlong answers → bias, scale, clip → normalise over samples; normalise process rewards over steps → rewards
of tokens (KL, steps, the reward at the last token) → GAE → normalise over tokens. With a discount by turn the returns
of turns take the place of what is between. No torch.

Shapes: B samples; m_i = trained tokens of sample i, T_i = its response tokens.
"""

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.trainer import advantages as adv
from actors.trainer.config import TrainerConfig
from actors.trainer.gae import gae
from actors.trainer.overlong import overlong_penalty
from actors.trainer.own import call
from actors.trainer.samples import TrainSample
from actors.trainer.turns import turn_advantages
from schemas.errors import UserError

Floats = npt.NDArray[np.float64]
AdvantageFunction = Callable[[Sequence[TrainSample], Floats], Any]


@dataclass(frozen=True, slots=True)
class Values:
    """What the critic thinks: of the trained tokens, [m_i] each, and of what is behind the last token, [B]."""

    tokens: Sequence[npt.NDArray[np.float32]]
    last: Floats


@dataclass(frozen=True, slots=True)
class Credit:
    """The result, per sample."""

    rewards: Floats  # [B], shaped
    advantages: tuple[Floats, ...]  # [m_i] each
    returns: tuple[Floats, ...]  # [m_i] each: what the critic learns


def trained_mask(sample: TrainSample, config: TrainerConfig) -> npt.NDArray[np.bool_]:
    """The sample's loss mask, bool [T]; all False for an unfinished answer, if such are to be masked."""
    if config.unfinished == "mask" and sample.finish == "length":
        return np.zeros_like(sample.loss_mask)
    return sample.loss_mask


def raw_rewards(samples: Sequence[TrainSample], config: TrainerConfig, max_new_tokens: int | None) -> Floats:
    """Rewards with the overlong penalty, before bias, scale and clip; float64 [B]."""
    rewards = np.array([s.reward for s in samples], dtype=np.float64)
    if config.overlong is not None:
        if max_new_tokens is None:
            raise ValueError("the overlong penalty needs max_new_tokens, the length at which answers are cut")
        rewards = rewards + overlong_penalty(
            [s.longest_turn for s in samples],
            max_new_tokens=max_new_tokens,
            tail=config.overlong.tail * max_new_tokens,
            factor=config.overlong.factor,
        )
    return rewards


def assign(
    samples: Sequence[TrainSample],
    config: TrainerConfig,
    *,
    max_new_tokens: int | None = None,
    reference_kl: Sequence[npt.NDArray[Any]] | None = None,
    values: Values | None = None,
    own: AdvantageFunction | None = None,
) -> Credit:
    """Advantages of the trained tokens of each sample.

    `reference_kl` [m_i] each is KL(behaviour ‖ reference), of which kl.coef is taken from the token's reward. `own` is
    the user's function `advantages(samples, rewards)`, which returns one number a sample or [T_i] numbers for each; it
    stands for everything behind the shaping of rewards.

    An answer that was cut has the critic's value behind its last token as its future; with `unfinished: no_reward` it
    loses its normalised reward. A reward at a masked token counts for the trained token before it.
    """
    group_ids = np.array([s.group_id for s in samples], dtype=np.int64)
    rewards, final = adv.of_batch(raw_rewards(samples, config, max_new_tokens), group_ids, config)
    masks = [trained_mask(s, config) for s in samples]
    if own is not None:
        chosen = _own(own, samples, rewards, masks)
        return Credit(rewards, chosen, chosen)
    section = config.advantage
    cut = np.array([s.finish == "length" for s in samples], dtype=np.bool_)
    if config.unfinished == "no_reward":
        final = np.where(cut, 0.0, final)

    lengths = np.array([int(mask.sum()) for mask in masks], dtype=np.int64)
    rows = np.arange(lengths.max(initial=0))[None, :] < lengths[:, None]  # bool [B, M]: trained tokens side by side
    token_rewards = np.zeros(rows.shape)
    old_values = np.zeros(rows.shape)
    of_steps = process_rewards(samples, config) if config.turn_discount is None else []
    for i, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        n = lengths[i]
        if reference_kl is not None and n:
            token_rewards[i, :n] = -config.kl.coef * reference_kl[i]
        if of_steps and sample.token_rewards is not None:
            places = np.cumsum(mask) - 1
            earned = places >= 0
            np.add.at(token_rewards[i], places[earned], of_steps[i][earned])
        if n:
            token_rewards[i, n - 1] += final[i]
        if values is not None:
            old_values[i, :n] = values.tokens[i]
    last = np.where(cut, values.last, 0.0) if values is not None else np.zeros(len(samples))
    if config.turn_discount is None:
        advantages, returns = gae(
            token_rewards, old_values, rows, last, discount=config.discount, gae_lambda=config.gae_lambda
        )
    else:
        of_turns = turn_advantages(samples, rewards, config.turn_discount, config)
        if config.unfinished == "no_reward":
            of_turns = [np.zeros_like(a) if of_cut else a for a, of_cut in zip(of_turns, cut, strict=True)]
        advantages = np.zeros(rows.shape)
        advantages[rows] = np.concatenate([np.zeros(0), *(a[m] for a, m in zip(of_turns, masks, strict=True))])
        returns = advantages
    if section.token_mean != "none" or section.token_std != "none":
        advantages[rows] = adv.normalise(
            advantages[rows],
            np.repeat(group_ids, lengths),
            mean=section.token_mean,
            std=section.token_std,
            eps=section.eps,
        )
    return Credit(rewards, _cut(advantages, lengths), _cut(returns, lengths))


def process_rewards(samples: Sequence[TrainSample], config: TrainerConfig) -> list[Floats]:
    """Process rewards, scaled and normalised as rewards of samples are, on the tokens where steps end: [T_i] each.

    ```
    r̃_j = (r_j − mean(R)) / (std(R) + eps),  R = rewards of all steps of all samples of the group, or of the batch
    ```
    `advantage.mean` and `.std` say of which, or that nothing is subtracted and divided by. With `leave_one_out` R is
    without the sample's own steps for the mean. A step without a reward is one of reward 0; where no steps are told,
    each token of the policy's own is one, and what is earned at others counts for the one before. With γ = λ = 1 and no
    critic the advantage of token t is then Σ of r̃_j over the steps that end at or after t: GRPO's process supervision.
    Samples without process rewards have zeros, and no part in R.

    Source: DeepSeekMath 2402.03300, §4.1.3.
    """
    out = [np.zeros(len(s.tokens)) for s in samples]
    having = [i for i, s in enumerate(samples) if s.token_rewards is not None]
    if not having:
        return out
    steps = {i: _steps(samples[i]) for i in having}
    values = np.concatenate([earned for _, earned in steps.values()])
    owners = np.repeat(having, [len(ends) for ends, _ in steps.values()])
    how = config.advantage
    normalised = adv.normalise(
        config.reward_scale * values,
        np.array([s.group_id for s in samples], dtype=np.int64)[owners],
        mean=how.mean,
        std=how.std,
        leave_one_out=how.leave_one_out,
        eps=how.eps,
        owners=owners,
    )
    for i in having:
        out[i][steps[i][0]] = normalised[owners == i]
    return out


def _steps(sample: TrainSample) -> tuple[npt.NDArray[np.int64], Floats]:
    """Where the steps of a sample with process rewards end, and what they earned: [K] each."""
    rewards = np.asarray(sample.token_rewards, np.float64)
    if sample.step_ends is not None:
        return sample.step_ends.astype(np.int64), rewards[sample.step_ends]
    made = sample.made
    before = np.cumsum(made) - 1
    earned = before >= 0
    of_steps = np.zeros(int(made.sum()))
    np.add.at(of_steps, before[earned], rewards[earned])
    return np.flatnonzero(made), of_steps


def _cut(rows: Floats, lengths: npt.NDArray[np.int64]) -> tuple[Floats, ...]:
    return tuple(row[:n] for row, n in zip(rows, lengths, strict=True))


def _own(
    function: AdvantageFunction,
    samples: Sequence[TrainSample],
    rewards: Floats,
    masks: Sequence[npt.NDArray[np.bool_]],
) -> tuple[Floats, ...]:
    name = getattr(function, "__name__", "advantages")
    remedy = "It must return one number for each sample, or an array of one number for each of its response tokens."
    found = call(f"The advantage function {name}", function, samples, rewards)
    count = len(found) if isinstance(found, Sized) else f"a {type(found).__name__}, not"
    if count != len(samples):
        raise UserError(
            f"The advantage function {name} returned {count} advantages for {len(samples)} samples.",
            remedy,
        )
    out = []
    for sample, mask, given in zip(samples, masks, found, strict=True):
        try:
            of_tokens = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError, RuntimeError) as error:  # the last of a tensor with a gradient
            told = f"The advantage function {name} returned no numbers for sample {sample.sample_id}: {error}"
            raise UserError(told, remedy) from error
        if of_tokens.ndim > 1 or (of_tokens.ndim == 1 and len(of_tokens) != len(mask)):
            raise UserError(
                f"The advantage function {name} returned shape {of_tokens.shape} for sample {sample.sample_id}, which "
                f"has {len(mask)} response tokens.",
                remedy,
            )
        of_trained = np.broadcast_to(of_tokens, len(mask))[mask]
        if not np.isfinite(of_trained).all():
            raise UserError(
                f"The advantage function {name} returned a number that is not finite for sample {sample.sample_id}.",
                "Guard its divisions: a group whose rewards are all equal has a standard deviation of 0.",
            )
        out.append(of_trained)
    return tuple(out)
