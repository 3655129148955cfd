"""Many ranks are one trainer: whatever the algorithm and however samples fall, the weights are those of one rank."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trainer import plan
from actors.trainer.config import TrainerConfig
from actors.trainer.learner import Learner
from actors.trainer.outline import all_samples, spread
from actors.trainer.ranks import OneRank, share_of, split
from schemas import Batch
from tests.actors.rank_threads import ThreadRanks, on_ranks, share
from tests.actors.tiny_models import qwen3, samples

LENGTHS = st.lists(st.integers(1, 5000), max_size=60)


@given(lengths=LENGTHS, ranks=st.integers(1, 9))
def test_a_split_is_balanced_to_within_one_sample(lengths: list[int], ranks: int) -> None:
    """Ranks wait for the slowest; and what every rank computes for itself must leave no sample to nobody or to two."""
    owners = split(lengths, ranks)
    loads = np.bincount(owners, weights=np.array(lengths, float), minlength=ranks)
    assert len(owners) == len(lengths)
    assert len(loads) == ranks
    assert loads.max() - loads.min() <= max(lengths, default=0)
    assert max(loads) <= sum(lengths) / ranks + max(lengths, default=0) * (1 - 1 / ranks) + 1e-9


@given(lengths=LENGTHS, ranks=st.integers(1, 9))
def test_a_batch_without_lengths_is_split_by_count(lengths: list[int], ranks: int) -> None:
    """Logs of older programs tell none."""
    n = len(lengths)
    batch = Batch(
        step=0, max_staleness=1, group_ids=[0] * n, indices=range(n), rollout_seqs=[1] * n, rewards=[0.0] * n,
        next_group=1,
    )  # fmt: skip
    shares = []
    for rank in range(ranks):
        one = OneRank()
        one.rank, one.count = rank, ranks  # type: ignore[misc]
        shares.append(share_of(batch, one).tolist())
    assert sorted(place for of_rank in shares for place in of_rank) == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def trained(config: TrainerConfig, ranks: int, steps: int = 2, groups: int = 3, size: int = 3):
    """Weights and metrics of each rank after some steps, on samples that two or four ranks cannot share evenly."""
    model = qwen3()

    def work(of: ThreadRanks):
        torch.set_num_threads(1)
        learner = Learner(copy.deepcopy(model), config, max_new_tokens=20, ranks=of)
        metrics = {}
        for step in range(steps):
            made = [
                replace(
                    s,
                    finish="length" if len(s.tokens) > 15 else "stop",
                    versions=np.full(len(s.tokens), max(step - 1, 0)),
                )
                for s in samples(groups, size, seed=step)
            ]
            metrics = learner.step(step, share(made, of.rank, of.count))
        return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}, metrics

    return on_ranks(ranks, work)


BASE = {"lr": 1e-3, "adam_eps": 1e-3, "micro_batch_tokens": 60}
ALGORITHMS = {
    "grpo in two mini-batches": {"minibatches": 2},
    "ppo with a critic": {"algorithm": "ppo"},
    "kl in the reward": {
        "reference": "initial", "kl": {"coef": 0.1, "place": "reward"}, "minibatches": 2,
    },
    "m2po": {"m2po_threshold": 0.04, "minibatches": 2},
    "overlong answers, sequence mean": {"overlong": {}, "aggregation": "sequence_mean", "unfinished": "mask"},
    "gspo": {"algorithm": "gspo"},
    "adapters": {"lora": {"rank": 4}, "minibatches": 2, "reference": "initial", "kl": {"coef": 0.1}},
    "entropy, approximate proximal": {"entropy_coef": 0.01, "proximal": "loglinear"},
}  # fmt: skip


@pytest.mark.parametrize("change", ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_several_ranks_give_the_weights_of_one(change: dict[str, object]) -> None:
    """The same algorithm code: N, advantages and masks are those of the whole batch, wherever its samples lie."""
    config = TrainerConfig(**{**BASE, **change})  # type: ignore[arg-type]
    ((weights, metrics),) = trained(config, 1)
    assert metrics["tokens_trained"] > 0
    for of_rank, told in trained(config, 2) + trained(config, 4):
        for name, tensor in weights.items():
            torch.testing.assert_close(of_rank[name], tensor, atol=1e-5, rtol=0)
        for name, value in metrics.items():
            if not name.startswith(("seconds_", "padding_", "explained_")):
                assert told[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_all_ranks_hold_the_same_bits() -> None:
    """Only rank 0 publishes: the others must not drift away from what it tells."""
    first, *others = trained(TrainerConfig(**BASE, minibatches=2), 3)  # type: ignore[arg-type]
    for other, _ in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first[0].items())


def test_a_rank_without_a_sample_follows() -> None:
    """A batch may have fewer samples than there are ranks."""
    config = TrainerConfig(**BASE)  # type: ignore[arg-type]
    ((weights, _),) = trained(config, 1, groups=1, size=2)
    for of_rank, _ in trained(config, 4, groups=1, size=2):
        for name, tensor in weights.items():
            torch.testing.assert_close(of_rank[name], tensor, atol=1e-5, rtol=0)


@settings(max_examples=15, deadline=None)
@given(ranks=st.integers(2, 4), seed=st.integers(0, 99), minibatches=st.integers(1, 3), tokens=st.integers(30, 200))
def test_ranks_take_the_same_number_of_micro_batches(ranks: int, seed: int, minibatches: int, tokens: int) -> None:
    """With weights in shards each forward is an act of all ranks; and every trained token stands in exactly one."""
    config = TrainerConfig(minibatches=minibatches, micro_batch_tokens=tokens)
    made, model = samples(3, 3, seed=seed), qwen3()
    torch.set_num_threads(1)

    def laid_out(of: ThreadRanks):
        batch = plan.ordered(0, share(made, of.rank, of.count), model, config, of)
        ones = {"advantages": [np.ones(n) for n in batch.trained]}
        useful = batch.trained > 0
        laid, _ = plan.lay_out(0, batch, useful, ones, config, max_new_tokens=None, device=torch.device("cpu"))
        return [(m.denominator, [len(micro.batch.targets) for micro in m.micros]) for m in laid]

    plan.model_traits(model)  # tried once, not by all threads at once
    of_ranks = on_ranks(ranks, laid_out)
    (alone,) = on_ranks(1, laid_out)
    for of_one, *of_all in zip(alone, *of_ranks, strict=True):
        assert {denominator for denominator, _ in of_all} == {of_one[0]}
        assert len({len(micros) for _, micros in of_all}) == 1
        assert sum(sum(micros) for _, micros in of_all) == sum(of_one[1])


@pytest.mark.parametrize("whole", [False, True])
def test_ranks_are_told_what_credit_needs_of_every_sample(whole: bool) -> None:
    """Tokens stay where they were fetched, unless a function of the user's may look at them."""
    made = [
        replace(
            s,
            versions=np.where(s.loss_mask, 3, -1).astype(np.int32),
            token_rewards=np.arange(len(s.tokens), dtype=np.float32),
        )
        for s in samples()
    ]

    def told(of: ThreadRanks):
        return all_samples(share(made, of.rank, 3), of, whole=whole)

    by_id = {s.sample_id: s for s in made}
    for rank, of_rank in enumerate(on_ranks(3, told)):
        assert sorted(s.sample_id for _, s in of_rank) == sorted(by_id)
        for owner, s in of_rank:
            expected = by_id[s.sample_id]
            assert (s.reward, s.group_id, s.finish, s.generated) == (
                expected.reward, expected.group_id, expected.finish, expected.generated,
            )  # fmt: skip
            assert (len(s.prompt_tokens), len(s.tokens)) == (len(expected.prompt_tokens), len(expected.tokens))
            np.testing.assert_array_equal(s.loss_mask, expected.loss_mask)
            np.testing.assert_array_equal(s.token_rewards, expected.token_rewards)
            if whole or owner == rank:
                np.testing.assert_array_equal(s.tokens, expected.tokens)
                np.testing.assert_array_equal(s.behaviour_logprobs, expected.behaviour_logprobs)
                np.testing.assert_array_equal(s.versions, expected.versions)


def test_arrays_of_a_rank_are_spread_to_all() -> None:
    owners, lengths = np.array([1, 0, 1, 2]), np.array([2, 0, 1, 3])
    whole = [np.arange(n, dtype=np.float32) + i for i, n in enumerate(lengths)]

    def work(of: ThreadRanks):
        own = [a if owner == of.rank else np.zeros(0, np.float32) for a, owner in zip(whole, owners, strict=True)]
        return spread(own, owners, of, lengths)

    for told in on_ranks(3, work):
        for got, expected in zip(told, whole, strict=True):
            np.testing.assert_array_equal(got, expected)
