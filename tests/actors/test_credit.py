"""From rewards to advantages of tokens, against the steps spelled out: groups, masks, cut answers, critic and KL.

The whole-step tests take this part as given; the goldens hold it to two rows.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trainer.aggregation import token_scales
from actors.trainer.config import AdvantageConfig, KlConfig, OverlongConfig, TrainerConfig
from actors.trainer.credit import Values, assign
from tests.actors import naive_losses as naive
from tests.actors.tiny_models import samples

LEVELS = st.sampled_from(["none", "batch", "group"])


@st.composite
def batches(draw):
    """Samples of mixed groups, some of them cut, with holes in their masks, versions, and rewards of steps."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    plain = samples(
        groups=draw(st.integers(1, 4)), size=draw(st.integers(1, 4)), seed=int(rng.integers(1000)), longest=8
    )
    made = []
    for s in plain:
        T = len(s.tokens)
        mask = rng.random(T) < 0.7
        rewarded, in_steps = rng.random() < 0.5, rng.random() < 0.5
        ends = np.flatnonzero(rng.random(T) < 0.4).astype(np.int32)
        token_rewards = rng.normal(size=T).astype(np.float32)
        if in_steps:
            token_rewards = np.where(np.isin(np.arange(T), ends), np.round(token_rewards), 0).astype(np.float32)
        made.append(
            replace(
                s,
                loss_mask=mask,
                reward=float(rng.choice([0.0, 0.5, 1.0])),
                finish="length" if rng.random() < 0.4 else "stop",
                versions=np.where(mask | (rng.random(T) < 0.5), 3, -1).astype(np.int32),
                token_rewards=token_rewards if rewarded else None,
                step_ends=ends if rewarded and in_steps else None,
            )
        )
    values = [rng.normal(size=int(s.loss_mask.sum())) for s in made]
    penalties = [rng.normal(size=int(s.loss_mask.sum())) for s in made]
    return made, Values(values, rng.normal(size=len(made))), penalties


def normalised(values, groups, mean, std, leave_one_out, eps, owners=None):
    """One value after the other, by the definition; `owners` share in what is left out."""
    owners = range(len(values)) if owners is None else owners

    def cell(level, i):
        return [j for j in range(len(values)) if level == "batch" or groups[j] == groups[i]]

    def centred(i):
        compared = [values[j] for j in cell(mean, i) if owners[j] != owners[i] or not leave_one_out]
        return values[i] - (np.mean(compared or values[i]) if mean != "none" else 0.0)

    out = []
    for i in range(len(values)):
        silent = mean != "none" and np.ptp([values[j] for j in cell(mean, i)]) < 1e-6
        silent |= std == "group" and len(cell("group", i)) == 1
        scale = 1.0
        if std != "none":
            deviations = [centred(j) for j in cell(std, i)]
            scale = np.sqrt(sum(d * d for d in deviations) / max(len(deviations) - 1, 1)) + eps
        out.append(0.0 if silent else centred(i) / scale)
    return out


@settings(deadline=None)
@given(
    batch=batches(),
    levels=st.tuples(LEVELS, LEVELS, LEVELS, LEVELS),
    leave_one_out=st.booleans(),
    discount=st.sampled_from([1.0, 0.9]),
    gae_lambda=st.sampled_from([1.0, 0.7]),
    unfinished=st.sampled_from(["train", "mask", "no_reward"]),
    with_critic=st.booleans(),
    coef=st.sampled_from([0.0, 0.3]),
    overlong=st.booleans(),
)
def test_advantages_are_those_of_the_steps_spelled_out(
    batch, levels, leave_one_out, discount, gae_lambda, unfinished, with_critic, coef, overlong
):
    made, values, penalties = batch
    mean, std, token_mean, token_std = levels
    section = AdvantageConfig(
        mean=mean,
        std=std,
        leave_one_out=leave_one_out and mean != "none",
        token_mean=token_mean,
        token_std=token_std,
    )
    config = TrainerConfig(
        advantage=section,
        discount=discount,
        gae_lambda=gae_lambda,
        unfinished=unfinished,
        reward_bias=-0.1,
        reward_scale=2.0,
        reward_clip=1.5,
        kl=KlConfig(coef=coef, place="reward"),
        reference="initial",
        overlong=OverlongConfig(tail=0.5, factor=0.7) if overlong else None,
    )
    if unfinished == "mask":  # nothing is asked of their tokens
        values = Values(
            [v[:0] if s.finish == "length" else v for v, s in zip(values.tokens, made, strict=True)], values.last
        )
        penalties = [p[:0] if s.finish == "length" else p for p, s in zip(penalties, made, strict=True)]
    credit = assign(
        made,
        config,
        max_new_tokens=8,
        reference_kl=penalties if coef else None,
        values=values if with_critic else None,
    )

    groups = [s.group_id for s in made]
    shaped = []
    for s in made:
        turns = "".join("m" if v >= 0 else " " for v in s.versions).split(" ")
        penalty = min(-(max(map(len, turns)) - 4) / 4 * 0.7, 0) if overlong else 0.0
        shaped.append(min(max((s.reward + penalty - 0.1) * 2, -1.5), 1.5))
    np.testing.assert_allclose(credit.rewards, shaped, atol=1e-9)
    of_samples = normalised(shaped, groups, mean, std, section.leave_one_out, section.eps)
    steps = []
    for i, s in enumerate(made):
        of_sample = {}
        for t in range(len(s.tokens)) if s.token_rewards is not None else ():
            if t in s.step_ends if s.step_ends is not None else s.versions[t] >= 0:
                of_sample[t] = 2.0 * float(s.token_rewards[t])
            elif s.step_ends is None and of_sample:  # earned where the policy was told something
                of_sample[max(of_sample)] += 2.0 * float(s.token_rewards[t])
        steps += [(i, t, r) for t, r in of_sample.items()]
    owners = [i for i, _, _ in steps]
    of_steps = normalised(
        [r for _, _, r in steps], [groups[i] for i in owners], mean, std, section.leave_one_out, section.eps, owners
    )
    process = {(i, t): r for (i, t, _), r in zip(steps, of_steps, strict=True)}
    rows, returns, of_groups = [], [], []
    for i, s in enumerate(made):
        mask = np.zeros_like(s.loss_mask) if unfinished == "mask" and s.finish == "length" else s.loss_mask
        n = int(mask.sum())
        rewards = np.zeros(n)
        if n and not (unfinished == "no_reward" and s.finish == "length"):
            rewards[-1] += of_samples[i]
        seen = 0
        for t in range(len(mask)):
            seen += int(mask[t])
            if seen:
                rewards[seen - 1] += process.get((i, t), 0.0)
        rewards -= coef * penalties[i]
        v = values.tokens[i] if with_critic else np.zeros(n)
        last = values.last[i] if with_critic and s.finish == "length" else 0.0
        rows.append(naive.gae(rewards, v, np.ones(n, bool), last, discount, gae_lambda))
        returns.append(rows[-1] + v)
        of_groups += [s.group_id] * n
    for ours, expected in zip(credit.returns, returns, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    flat = np.concatenate(rows)
    if (token_mean, token_std) != ("none", "none"):
        flat = normalised(flat, of_groups, token_mean, token_std, False, section.eps)
    np.testing.assert_allclose(np.concatenate(credit.advantages), flat, rtol=1e-4, atol=1e-4)


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_each_aggregation_is_the_mean_that_its_name_says(lengths):
    """Against means over real losses: tokens, then sequences, then a constant."""
    rng = np.random.default_rng(sum(lengths))
    losses = [rng.normal(size=n) for n in lengths]
    total, present = sum(lengths), [row for row in losses if len(row)]
    if not present:
        return

    def ours(how):
        scales = token_scales(how, lengths, 20)
        weighted = losses if scales is None else [scale * row for scale, row in zip(scales, losses, strict=True)]
        return sum(row.sum() for row in weighted) / total

    assert ours("token_mean") == pytest.approx(np.concatenate(losses).mean())
    assert ours("sequence_mean") == pytest.approx(np.mean([row.mean() for row in present]))
    assert ours("constant") == pytest.approx(np.mean([row.sum() / 20 for row in present]))


def test_stale_and_tool_tokens_count_for_the_overlong_penalty_as_they_should():
    """Stale tokens were generated, a tool's were not, and turns are cut one by one: the longest counts."""
    made = samples()[0]
    T = 10
    sample = replace(
        made,
        tokens=np.ones(T, np.int32),
        behaviour_logprobs=np.zeros(T, np.float32),
        loss_mask=np.isin(np.arange(T), [4, 5, 8, 9]),
        versions=np.array([0, 0, 0, 0, 1, 1, -1, -1, 1, 1], np.int32),
    )
    assert (sample.generated, sample.longest_turn) == (8, 6)
    assert replace(sample, sequences=np.array([1, 3, len(made.prompt_tokens) - 1, 7], np.int32)).longest_turn == 3
    assert replace(sample, versions=None).generated == 4


def test_a_reward_at_a_masked_token_counts_for_what_led_to_it():
    """A step's reward may stand at the tool's answer; one before all trained tokens is nobody's merit."""
    made = samples()[0]
    sample = replace(
        made,
        tokens=np.ones(5, np.int32),
        behaviour_logprobs=np.zeros(5, np.float32),
        loss_mask=np.array([False, True, False, True, False]),
        token_rewards=np.array([10, 0, 2, 0, 3], np.float32),
        reward=1.0,
    )
    config = TrainerConfig(advantage=AdvantageConfig(mean="none", std="none"), discount=0.5, lr=1e-2)
    np.testing.assert_allclose(assign([sample], config).advantages[0], [2 + 0.5 * 4, 4])


def of_steps(name, reward, token_rewards, ends, group=0):
    T = len(token_rewards)
    return replace(
        samples()[0],
        sample_id=name,
        group_id=group,
        tokens=np.ones(T, np.int32),
        behaviour_logprobs=np.zeros(T, np.float32),
        loss_mask=np.ones(T, np.bool_),
        reward=reward,
        token_rewards=np.array(token_rewards, np.float32),
        step_ends=np.array(ends, np.int32),
    )


def test_grpo_normalises_steps_within_the_group_and_sums_up_those_that_follow():
    """DeepSeekMath §4.1.3 by hand: R = {1, 1, 0}, mean 2/3, std 1/√3 over n−1; a wrong step is one of reward 0."""
    right, wrong = of_steps("a", 1.0, [0, 1, 0, 1], [1, 3]), of_steps("b", 1.0, [0, 0], [1])
    other = of_steps("c", 1.0, [5, 7], [0, 1], group=1)  # of another group, and no part of R
    credit = assign([right, wrong, other], TrainerConfig(lr=1e-2))
    up, down = (1 / 3) * 3**0.5, (-2 / 3) * 3**0.5
    np.testing.assert_allclose(credit.advantages[0], [2 * up, 2 * up, up, up], rtol=1e-4)
    np.testing.assert_allclose(credit.advantages[1], [down, down], rtol=1e-4)
    np.testing.assert_allclose(credit.advantages[2], [0, 0.5**0.5], rtol=1e-4, atol=1e-4)


def test_rewards_of_steps_and_of_the_answer_add_up():
    config = TrainerConfig(advantage=AdvantageConfig(mean="none", std="none"), lr=1e-2)
    credit = assign([of_steps("a", 10.0, [0, 1, 0, 2], [1, 3])], config)
    np.testing.assert_allclose(credit.advantages[0], [13, 13, 12, 12])
