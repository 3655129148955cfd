"""A metric that means something else than its name is worse than none: each is held to a plain recount."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trainer.config import TrainerConfig
from actors.trainer.learner import Learner
from actors.trainer.metrics import METRICS, Wait, described, of_ages, of_times
from tests.actors.rank_threads import on_ranks
from tests.actors.test_learner import qwen3, samples, with_logprobs_of

MOMENT = st.floats(0, 100, allow_nan=False)


def test_each_second_of_waiting_has_one_cause() -> None:
    """Began at 10; the last rollout was stored 6 s, its verdict 2 s before the batch, which came at 20."""
    wait = Wait(began=10.0, arrived=20.0, loaded=20.5)
    assert wait.by_cause(1000.0, 1004.0, 1006.0) == {
        "generation": 4.0,
        "reward": 4.0,
        "controller": 2.0,
        "loading": 0.5,
    }
    early = wait.by_cause(900.0, 1005.0, 1006.0)  # it had long been generated
    assert early == {"generation": 0.0, "reward": 9.0, "controller": 1.0, "loading": 0.5}
    assert sum(Wait(10.0, 3.0, 9.0).by_cause(1.0, 2.0, 3.0).values()) == 0.0  # the batch lay there
    assert Wait(10.0, 3.0, 12.0).by_cause(1.0, 2.0, 3.0)["loading"] == 2.0  # but not yet its samples


@settings(deadline=None)
@given(began=MOMENT, arrived=MOMENT, more=MOMENT, times=st.tuples(MOMENT, MOMENT, MOMENT))
def test_the_causes_sum_up_to_the_wait(began: float, arrived: float, more: float, times: tuple[float, ...]) -> None:
    """Whatever the clocks say: those of two machines may disagree."""
    causes = Wait(began, arrived, arrived + more).by_cause(*times)
    assert all(seconds >= 0 for seconds in causes.values())
    assert sum(causes.values()) == pytest.approx(max(0.0, arrived + more - began), abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=6))
def test_ages_are_those_of_the_tokens(counts: list[int]) -> None:
    ages = np.repeat(np.arange(len(counts)), counts)
    told = of_ages(np.array(counts, np.int64))
    assert told["tokens_trained"] == len(ages)
    assert told["staleness_min"] == min(ages, default=0)
    assert told["staleness_max"] == max(ages, default=0)
    assert told["staleness_mean"] == pytest.approx(ages.mean() if len(ages) else 0.0)


def test_rates_and_shares_of_a_step() -> None:
    assert of_times({"seconds": 4.0, "seconds_waiting": 1.0}, 100.0) == {"tokens_per_s": 25.0, "idle_fraction": 0.25}
    assert of_times({"seconds": 0.0, "seconds_waiting": 0.0}, 0.0) == {"tokens_per_s": 0.0, "idle_fraction": 0.0}


def test_lengths_rewards_and_advantages_are_recounted() -> None:
    made = [dataclasses.replace(s, finish="length" if i % 4 == 0 else "stop") for i, s in enumerate(samples())]
    told = Learner(qwen3(), TrainerConfig()).step(0, made)
    lengths = sorted(len(s.tokens) for s in made)
    assert told["response_length_mean"] == pytest.approx(np.mean(lengths))
    assert (told["response_length_min"], told["response_length_max"]) == (lengths[0], lengths[-1])
    assert told["response_length_p95"] == min(n for n in lengths if sum(x <= n for x in lengths) >= 0.95 * len(lengths))
    assert told["prompt_length_mean"] == pytest.approx(np.mean([len(s.prompt_tokens) for s in made]))
    assert told["prompt_length_max"] == max(len(s.prompt_tokens) for s in made)
    assert told["finished_fraction"] == 0.75
    assert (told["reward_min"], told["reward_max"]) == (0.0, 1.0)
    assert told["advantage_max"] == -told["advantage_min"] == pytest.approx(told["advantage_std"], rel=1e-3)


def test_no_sample_at_all_has_metrics_too() -> None:
    """A batch may consist of samples that are all too old."""
    told = Learner(qwen3(), TrainerConfig()).step(0, [])
    assert told["samples"] == told["response_length_p95"] == told["reward_min"] == told["ess"] == 0.0
    assert all(math.isfinite(value) for value in told.values())


def test_the_engine_is_compared_where_it_used_the_same_weights_and_nowhere_else() -> None:
    """An older token differs because the policy has moved, by however much; that is no fault of the engine."""
    learner, step = Learner(qwen3(), TrainerConfig(minibatches=2, lr=1e-2)), 7
    made, shifts = [], []
    for s in with_logprobs_of(learner.model, samples()):
        fresh = np.arange(len(s.tokens)) % 3 == 0
        shift = np.where(fresh, np.where(np.arange(len(s.tokens)) % 2, 0.25, -0.5), 3.0).astype(np.float32)
        versions = np.where(fresh, step, step - 1).astype(np.int32)
        made.append(dataclasses.replace(s, behaviour_logprobs=s.behaviour_logprobs + shift, versions=versions))
        shifts.append(shift[fresh & s.loss_mask])
    difference = np.concatenate(shifts).astype(np.float64)
    told = learner.step(step, made)
    assert told["engine_tokens"] == len(difference)
    assert told["engine_mismatch_k1"] == pytest.approx(difference.mean(), abs=1e-4)
    assert told["engine_mismatch_k3"] == pytest.approx((np.exp(-difference) - 1 + difference).mean(), rel=1e-3)
    assert told["engine_mismatch_max"] == pytest.approx(0.5, abs=1e-4)
    assert told["behaviour_ratio_max"] == pytest.approx(math.exp(0.5), rel=1e-3)
    assert told["mismatch_kl"] > 1.0  # of all tokens
    old = [dataclasses.replace(s, versions=np.full(len(s.tokens), step, np.int32)) for s in made]
    later = learner.step(step + 1, old)
    assert later["engine_tokens"] == 0
    assert not any(name.startswith("engine_mismatch") for name in later)


def test_a_coupled_loss_is_compared_in_the_first_mini_batch_only() -> None:
    """In the later ones the trainer has no logprobs under the weights before the step: they have moved."""
    coupled, decoupled = (
        Learner(qwen3(), TrainerConfig(minibatches=2, lr=1e-2, loss=loss)) for loss in ("ppo", "decoupled_ppo")
    )
    made = with_logprobs_of(coupled.model, samples())
    made = [dataclasses.replace(s, versions=np.zeros(len(s.tokens), np.int32)) for s in made]
    first, both = coupled.step(0, made), decoupled.step(0, made)
    assert 0 < first["engine_tokens"] < both["engine_tokens"] == both["tokens_with_gradient"]
    assert first["engine_mismatch_max"] < 1e-4
    assert both["engine_mismatch_max"] < 1e-4


def test_the_effective_sample_size_of_a_coupled_loss_is_that_of_its_ratio() -> None:
    """Its weight is 1 for all: told as such, samples would seem fresh that are not."""
    learner = Learner(qwen3(), TrainerConfig(loss="ppo"))
    made = []
    for s in with_logprobs_of(learner.model, samples()):
        shift = np.where(np.arange(len(s.tokens)) % 2, 1.0, 0.0).astype(np.float32)
        made.append(dataclasses.replace(s, behaviour_logprobs=s.behaviour_logprobs + shift))
    w = np.exp(-np.concatenate([np.arange(len(s.tokens))[s.loss_mask] % 2 for s in made]).astype(np.float64))
    told = learner.step(0, made)
    assert told["ess"] == pytest.approx(w.sum() ** 2 / (w**2).sum() / len(w), abs=1e-4)
    assert told["behaviour_weight_mean"] == 1.0


def test_means_over_ranks_are_those_of_all_tokens() -> None:
    """One rank has few tokens and one has many: a mean of their means would be another number."""
    model = qwen3()
    made = with_logprobs_of(model, samples(groups=3, size=4, seed=2))
    made = [
        dataclasses.replace(
            s,
            behaviour_logprobs=s.behaviour_logprobs + np.float32(0.1 * i),
            versions=np.full(len(s.tokens), 4 - i % 2, np.int32),
        )
        for i, s in enumerate(made)
    ]
    whole = Learner(copy.deepcopy(model), TrainerConfig()).step(4, made)

    def lopsided(rank: object) -> dict[str, float]:
        learner = Learner(copy.deepcopy(model), TrainerConfig(), ranks=rank)  # type: ignore[arg-type]
        return learner.step(4, made[:1] if rank.rank == 0 else made[1:])  # type: ignore[attr-defined]

    for told in on_ranks(2, lopsided):
        for name, value in whole.items():
            if not name.startswith(("seconds_", "padding_")):
                assert told[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_the_same_step_tells_the_same_numbers() -> None:
    """A replay compares them bit by bit."""
    told = [Learner(qwen3(), TrainerConfig(minibatches=2)).step(3, samples()) for _ in range(2)]
    first, second = ({k: v for k, v in each.items() if not k.startswith("seconds_")} for each in told)
    assert first == second


def test_every_metric_has_one_name_and_a_meaning() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.what for metric in METRICS)
    found = described("seen/dropped/stale")
    assert found is not None
    assert found.name == "seen/"
    assert described("no such thing") is None
