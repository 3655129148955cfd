"""A token that the policy was told must teach nothing, and a sample of several sequences must teach as one.

Held here to steps and credit spelled out, where each sequence is a forward of its own and a mask is a loop.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.episode.trajectory import Said, Trajectory, rollout_of
from actors.trainer import plan
from actors.trainer.config import AdvantageConfig, TrainerConfig
from actors.trainer.credit import assign
from actors.trainer.learner import Learner
from actors.trainer.ranks import OneRank
from actors.trainer.samples import train_sample
from actors.trainer.turns import discounted_returns, ends_of_turns
from ops.diff import Comparer
from ops.mismatch import Mismatch
from schemas import Answer, Prompt, Rollout
from schemas.trajectory import cuts, model_tokens
from tests.actors import naive_step
from tests.actors.rank_threads import on_ranks, share
from tests.actors.test_credit import normalised
from tests.actors.tiny_model import plain_logprobs
from tests.actors.tiny_models import qwen3, samples, trajectories

BASE = {"lr": 1e-3, "adam_eps": 1e-3, "micro_batch_tokens": 60}
WAYS = {
    "grpo": {"minibatches": 2},
    "sequence mean": {"aggregation": "sequence_mean", "minibatches": 2},
    "constant": {"aggregation": "constant"},
    "a critic": {"algorithm": "ppo"},
    "kl and entropy": {"reference": "initial", "kl": {"coef": 0.1}, "entropy_coef": 0.01},
    "kl in the reward": {"reference": "initial", "kl": {"coef": 0.1, "place": "reward"}, "minibatches": 2},
    "by turn": {"turn_discount": 0.9},
}
OF_SEQUENCES = {
    "gspo": {"algorithm": "gspo", "clip": 0.2, "clip_high": 0.3},
    "opsm": {"opsm_threshold": 0.05},
    "mis": {"behaviour_weight": "mis"},
    "geometric": {"behaviour_weight": "geometric"},
}


def apart(s):
    """The sequences of a sample, each as a sample."""
    none = np.zeros(0, np.int32)
    return [
        replace(
            s, prompt_tokens=s.prompt_tokens[p], tokens=s.tokens[t], behaviour_logprobs=s.behaviour_logprobs[t],
            loss_mask=s.loss_mask[t], versions=s.versions[t], sequences=None, token_rewards=None, step_ends=None,
        )
        for p, t in cuts(none if s.sequences is None else s.sequences, len(s.prompt_tokens), len(s.tokens))
    ]  # fmt: skip


class NaiveTrajectories(naive_step.NaiveLearner):
    """The naive step where a sample may be several sequences, each asked by itself."""

    def values(self, s):
        found = [super(NaiveTrajectories, self).values(part) for part in apart(s)]
        return torch.cat([values for values, _ in found]), found[-1][1]


def of_several(function):
    """What a naive function says of each sequence, one after the other."""

    def asked(model, s, *rest):
        return torch.cat([function(model, part, *rest) for part in apart(s)])

    return asked


@pytest.fixture(autouse=True)
def _in_sequences(monkeypatch):
    monkeypatch.setattr(naive_step, "alone", of_several(naive_step.alone))
    whole = naive_step.alone

    def logprobs_of(model, s):
        return whole(model, s).gather(1, torch.from_numpy(s.tokens).long()[:, None])[s.loss_mask, 0]

    monkeypatch.setattr(naive_step, "logprobs_of", logprobs_of)


@pytest.mark.parametrize("change", WAYS.values(), ids=WAYS.keys())
def test_a_step_on_trajectories_is_the_step_spelled_out(change):
    config = TrainerConfig(**BASE, **change)
    naive = NaiveTrajectories(qwen3(), config)
    learner = Learner(qwen3(), config, max_new_tokens=20)
    for step in range(2):
        made = trajectories(3, 3, seed=step)
        naive.step(step, made)
        learner.step(step, made)
    theirs = dict(naive.model.named_parameters())
    for name, parameter in learner.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), theirs[name].detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("change", OF_SEQUENCES.values(), ids=OF_SEQUENCES.keys())
def test_a_ratio_of_a_sequence_is_that_of_its_own_tokens(change):
    """Sequences of a sample are conditioned apart, so each has its ratio; a token that was told has none."""
    config = TrainerConfig(**BASE, **change)
    made = [replace(s, token_rewards=None, step_ends=None) for s in trajectories(3, 3, seed=4)]
    credit = assign(made, config)
    naive = naive_step.NaiveLearner(qwen3(), config)
    parts = [
        (part, a) for s, advantage in zip(made, credit.advantages, strict=True) for part, a in pieces(s, advantage)
    ]
    prox = {id(part): naive_step.logprobs_of(naive.model, part) for part, _ in parts}
    N, S, total = sum(int(s.loss_mask.sum()) for s in made), len(made), 0.0
    for part, advantage in parts:
        p = prox[id(part)]
        b = torch.from_numpy(part.behaviour_logprobs[part.loss_mask])
        A = torch.from_numpy(advantage).float()
        terms = naive._policy_loss(p, p.detach(), b, A)
        if config.opsm_threshold is not None:
            terms = terms * ~((A < 0) & ((b - p.detach()).mean() > config.opsm_threshold))
        mine = next(s for s in made if s.sample_id == part.sample_id)
        weight = 1 / N if config.aggregation == "token_mean" else 1 / S / int(mine.loss_mask.sum())
        total = total + weight * terms.sum()
    naive._update(naive.adam, total)
    learner = Learner(qwen3(), config, max_new_tokens=20)
    learner.step(0, made)
    theirs = dict(naive.model.named_parameters())
    for name, parameter in learner.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), theirs[name].detach(), atol=2e-5, rtol=0)


def pieces(s, advantage):
    """The sequences of a sample that are trained, each with the advantages of its trained tokens."""
    at, out = 0, []
    for part in apart(s):
        n = int(part.loss_mask.sum())
        if n:
            out.append((part, advantage[at : at + n]))
        at += n
    return out


def test_what_the_policy_was_told_changes_the_gradient_only_as_context():
    """Its logprobs, its rewards and its place in the statistics do not count: noise there changes no bit."""
    made = trajectories(3, 3, seed=1)
    rng = np.random.default_rng(0)
    noisy = [
        replace(
            s,
            behaviour_logprobs=np.where(s.made, s.behaviour_logprobs, rng.normal(size=len(s.tokens))).astype(
                np.float32
            ),
        )
        for s in made
    ]
    ends = []
    for these in (made, noisy):
        learner = Learner(qwen3(), TrainerConfig(**BASE, algorithm="gspo", behaviour_weight="mis"))
        metrics = learner.step(0, [replace(s, token_rewards=None, step_ends=None) for s in these])
        ends.append((learner.weights(torch.float32), metrics))
    assert all(torch.equal(ends[0][0][name], tensor) for name, tensor in ends[1][0].items())
    for name, value in ends[0][1].items():
        assert name.startswith("seconds_") or ends[1][1][name] == value, name
    assert ends[0][1]["tokens_trained"] == sum(int(s.loss_mask.sum()) for s in made)
    assert ends[0][1]["response_length_mean"] == pytest.approx(np.mean([s.made.sum() for s in made]))
    assert ends[0][1]["observation_tokens"] == sum(int((~s.made).sum()) for s in made)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 99), tokens=st.integers(40, 400), row=st.sampled_from([0, 40]), order=st.randoms())
def test_packing_and_order_change_nothing(seed, tokens, row, order):
    """Every trained token is learned from once, at its own place, whatever row its sequence lies in."""
    torch.set_num_threads(1)
    model, made = qwen3(), trajectories(2, 3, seed=seed)
    shuffled = list(made)
    order.shuffle(shuffled)
    grads = []
    for these, config in (
        (made, TrainerConfig(micro_batch_tokens=10_000)),
        (shuffled, TrainerConfig(micro_batch_tokens=tokens, row_tokens=row)),
    ):
        learner = Learner(copy.deepcopy(model), config)
        minibatches, _ = learner._plan(0, these)
        trained = [int(t) for m in minibatches for micro in m.micros for t in micro.batch.targets]
        credit = assign(sorted(made, key=lambda s: s.sample_id), config)
        useful = [s for s, a in zip(sorted(made, key=lambda s: s.sample_id), credit.advantages, strict=True) if a.any()]
        assert sorted(trained) == sorted(int(t) for s in useful for t in s.tokens[s.loss_mask])
        metrics = learner.step(0, these)
        grads.append((metrics["loss"], metrics["grad_norm"]))
    assert grads[0] == pytest.approx(grads[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("change", [{"minibatches": 2}, {"algorithm": "ppo"}, {"turn_discount": 0.5}], ids=str)
def test_ranks_share_trajectories_and_learn_as_one(change):
    config, model = TrainerConfig(**BASE, **change), qwen3()

    def work(of):
        torch.set_num_threads(1)
        learner = Learner(copy.deepcopy(model), config, max_new_tokens=20, ranks=of)
        metrics = learner.step(0, share(trajectories(3, 3), of.rank, of.count))
        return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}, metrics

    ((weights, alone),) = on_ranks(1, work)
    for of_rank, told in on_ranks(3, work):
        for name, tensor in weights.items():
            torch.testing.assert_close(of_rank[name], tensor, atol=1e-5, rtol=0)
        for name, value in alone.items():
            if not name.startswith(("seconds_", "padding_", "explained_")):
                assert told[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_a_sequence_with_nothing_to_train_does_not_go_through_the_model():
    """Of a trajectory whose first turns are too old only the last one costs anything."""
    s = samples(1, 2)[0]
    T, P = len(s.tokens), len(s.prompt_tokens)
    assert min(T, P) > 1
    pairs = np.array([1, 1, P - 1, T - 1], np.int32)
    made = [
        replace(s, sample_id=str(i), reward=float(i), sequences=pairs, loss_mask=np.arange(T) > 0) for i in range(2)
    ]
    batch = plan.ordered(0, made, qwen3(), TrainerConfig(), OneRank())
    assert batch.sequences_of([0, 1]) == [1, 3]
    assert Learner(qwen3(), TrainerConfig()).step(0, made)["tokens_packed"] == 2 * (P + T - 2)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99))
def test_a_frozen_model_is_asked_of_all_trained_tokens_and_of_what_is_behind_the_last_sequence(seed):
    """A critic is asked about a trajectory that was cut at its very end, be the last sequence trained or not."""
    batch = plan.ordered(0, trajectories(2, 3, seed=seed), qwen3(), TrainerConfig(), OneRank())

    def read(micro):
        return micro.targets.float(), micro.input_ids.flatten()[micro.ends].float()

    told, ends = plan.ask(batch, read, TrainerConfig(micro_batch_tokens=50), torch.device("cpu"))
    for s, mask, found, end in zip(batch.samples, batch.masks, told, ends, strict=True):
        assert found.tolist() == s.tokens[mask].tolist()
        assert end == (s.tokens[-1] if mask.any() else 0)


# ---- credit by turn


@given(rewards=st.lists(st.floats(-5, 5), min_size=1, max_size=8), discount=st.floats(0, 1))
def test_a_return_is_the_sum_of_all_that_followed_each_discounted_by_its_distance(rewards, discount):
    K = len(rewards)
    expected = [sum(discount ** (j - k) * rewards[j] for j in range(k, K)) for k in range(K)]
    np.testing.assert_allclose(discounted_returns(rewards, discount), expected, rtol=1e-9, atol=1e-9)


LEVELS = st.sampled_from(["none", "batch", "group"])


@settings(deadline=None)
@given(
    seed=st.integers(0, 999),
    discount=st.sampled_from([0.0, 0.5, 1.0]),
    mean=LEVELS,
    std=LEVELS,
    leave_one_out=st.booleans(),
)
def test_credit_by_turn_is_that_of_the_steps_spelled_out(seed, discount, mean, std, leave_one_out):
    made = trajectories(2, 3, seed=seed)
    section = AdvantageConfig(mean=mean, std=std, leave_one_out=leave_one_out and mean != "none")
    config = TrainerConfig(turn_discount=discount, advantage=section, reward_scale=2.0, reward_bias=0.5)
    flat, owners, turn_of = [], [], []
    for i, s in enumerate(made):
        turns, at = [], []  # what each earned, and the turn of each token
        ends = set(ends_of_turns(s).tolist())
        for t in range(len(s.tokens)):
            if t == 0 or t - 1 in ends:
                turns.append(0.0)
            turns[-1] += 0.0 if s.token_rewards is None else 2.0 * float(s.token_rewards[t])
            at.append(len(turns) - 1)
        places = list(range(len(turns))) if s.asked is None else s.asked[1::2].tolist()
        turns[places.index(max(places))] += 2.0 * (s.reward + 0.5)
        for k in range(len(turns)):
            after = [j for j in range(len(turns)) if places[j] >= places[k]]
            flat.append(sum(discount ** (places[j] - places[k]) * turns[j] for j in after))
            owners.append(i)
        turn_of.append(at)
    groups = [made[i].group_id for i in owners]
    expected = normalised(flat, groups, mean, std, section.leave_one_out, section.eps, owners)
    for i, (s, ours) in enumerate(zip(made, assign(made, config).advantages, strict=True)):
        of_turns = [a for a, owner in zip(expected, owners, strict=True) if owner == i]
        theirs = [of_turns[k] for k, trained in zip(turn_of[i], s.loss_mask, strict=True) if trained]
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


WAY_OF_AN_AGENT = [((1,), (5, 5)), ((9,), (6,)), ((1, 5, 5, 8), (7, 7))]  # prompt and answer; the helper's is (6,)


@pytest.mark.parametrize("rewarded", [False, True])
@pytest.mark.parametrize("turns", [[0, 1, 2], [0, 2, 1]])
def test_credit_by_turn_goes_by_when_an_agent_asked_and_not_by_where_its_tokens_stand(turns, rewarded):
    """Between two turns of its conversation it asks a helper, or afterwards: all is worth what came of it in time."""
    said = []
    for number, k in enumerate(turns):
        prompt_tokens, tokens = WAY_OF_AN_AGENT[k]
        answer = Answer(
            group_id=1, index=2, turn=f"1-2/0-{number + 9}-0/x", tokens=tokens, logprobs=[-1.0] * len(tokens),
            segments=[(3, len(tokens))], finish="stop", text="",
        )  # fmt: skip
        said.append(Said(prompt_tokens, answer))
    prompt = Prompt(group_id=1, index=2, group_size=4, prompt="?", task={}, seed=0, min_version=0)
    earned = (0.0, 16.0, 0.0) if rewarded else ()
    rollout = rollout_of(prompt, Trajectory(said, "", "stop", reward=8.0, turn_rewards=earned))
    scored = SimpleNamespace(token_rewards=rollout.token_rewards, step_ends=rollout.step_ends) if rewarded else None
    count = len(rollout.tokens)
    s = train_sample(rollout, np.ones(count, np.bool_), np.full(count, 3), 8.0, scored)
    none = AdvantageConfig(mean="none", std="none")
    (ours,) = assign([s], TrainerConfig(turn_discount=0.5, advantage=none)).advantages
    worth = [10.0, 20.0, 8.0] if rewarded else [2.0, 4.0, 8.0]
    by_token = dict(zip(s.tokens[s.loss_mask].tolist(), ours.tolist(), strict=True))
    assert [by_token[WAY_OF_AN_AGENT[k][1][0]] for k in turns] == worth
    unknown = train_sample(replace(rollout, turns=["?"] * 3), np.ones(count, np.bool_), np.full(count, 3), 8.0)
    assert unknown.asked is None


def test_of_one_turn_each_a_discount_by_turn_changes_nothing():
    plain = assign(samples(), TrainerConfig())
    whole = [replace(s, versions=np.zeros(len(s.tokens), np.int32)) for s in samples()]
    by_turn = assign(whole, TrainerConfig(turn_discount=0.5))
    for one, other in zip(plain.advantages, by_turn.advantages, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "ppo"},
        {"gae_lambda": 0.9},
        {"loss": "gspo"},
        {"reference": "initial", "kl": {"coef": 0.1, "place": "reward"}},
        {"advantage": {"function": "mine.py:advantages"}},
    ],
    ids=str,
)
def test_a_discount_by_turn_is_refused_beside_what_it_has_no_part_in(change):
    with pytest.raises(ValueError, match=r"turn_discount 0\.5 with"):
        TrainerConfig(turn_discount=0.5, **change)


# ---- from the log


def test_a_rollout_is_trained_where_the_model_made_it_and_it_is_young_enough():
    rollout = Rollout(
        group_id=1, index=2, group_size=4, prompt="?", task={}, finish="stop", text="", prompt_tokens=[1, 2, 3],
        tokens=[4, 5, 6, 7, 8], logprobs=[-1, 0, 0, -1, -1], segments=[(3, 3), (5, 2)], observations=[1, 2],
        sequences=[1, 4, 2, 1],
    )  # fmt: skip
    s = train_sample(rollout, np.array([False, False, True, True, True]), np.array([3, 3, 3, 5, 5]), 1.0)
    assert s.loss_mask.tolist() == [False, False, False, True, True]
    assert s.versions is not None
    assert s.versions.tolist() == [3, -1, -1, 5, 5]
    assert s.turn_ends.tolist() == [0, 3, 4]


def rollouts_of(model, version, seed):
    """Trajectories as an engine that holds `model` makes them: each of its tokens with the logprob at its place."""
    made = []
    for s in trajectories(3, 2, seed=seed):
        pairs = np.zeros(0, np.int32) if s.sequences is None else s.sequences
        logprobs = np.zeros(len(s.tokens), np.float32)
        for p, t in cuts(pairs, len(s.prompt_tokens), len(s.tokens)):
            logprobs[t] = plain_logprobs(model, s.prompt_tokens[p], s.tokens[t])
        told = np.flatnonzero(~s.made)
        made.append(
            Rollout(
                group_id=s.group_id, index=int(s.sample_id[-1]), group_size=2, prompt="?", task={}, finish="stop",
                text="", prompt_tokens=s.prompt_tokens, tokens=s.tokens, logprobs=np.where(s.made, logprobs, 0),
                segments=[(version, len(s.tokens))], sequences=pairs,
                observations=np.stack([told, np.ones_like(told)], axis=1).reshape(-1),
            )
        )  # fmt: skip
    return made


def test_every_trained_logprob_is_found_again_from_the_recorded_ids():
    """What the trainer conditions a token on is what the engine did: its own sequence, what was told in it included."""
    model, version = qwen3(), 5
    rollouts = rollouts_of(model, version, seed=2)
    fresh = [np.ones(len(r.tokens), np.bool_) for r in rollouts]
    made = [train_sample(r, m, m * version, float(r.index)) for r, m in zip(rollouts, fresh, strict=True)]
    told = Learner(model, TrainerConfig(micro_batch_tokens=80)).step(version, made)
    assert told["engine_tokens"] == told["tokens_trained"] == sum(s.generated for s in made)
    assert told["engine_mismatch_max"] < 1e-4
    assert told["behaviour_ratio_max"] < 1 + 1e-4


def test_a_diff_compares_what_the_model_made_and_nothing_else():
    learner, version = Learner(qwen3(), TrainerConfig(micro_batch_tokens=80)), 5
    rollouts = rollouts_of(learner.model, version, seed=3)
    mismatch = Mismatch(1e-4, 3)
    Comparer(None, {}, mismatch)._compare(version, rollouts, learner)
    assert mismatch.all.tokens == sum(int(model_tokens(r.observations, len(r.tokens)).sum()) for r in rollouts)
    assert mismatch.all.largest < 1e-4
    (first, *rest) = rollouts
    at = int(np.flatnonzero(model_tokens(first.observations, len(first.tokens)))[-1])
    wrong = np.where(np.arange(len(first.tokens)) == at, first.logprobs - 0.5, first.logprobs)
    planted = Mismatch(1e-4, 3)
    Comparer(None, {}, planted)._compare(version, [replace(first, logprobs=wrong), *rest], learner)
    assert (planted.offenders[0].sample_id, planted.offenders[0].position) == (first.sample_id, at)
