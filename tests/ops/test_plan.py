"""A plan is believed for numbers that nobody can check by a run: so its model must equal what can be computed, its own
naive twin, and the production actors on the log.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.controller.config import ControllerConfig
from ops.plan.baselines import one_step_overlap, synchronous
from ops.plan.cluster import Cluster, Workload
from ops.plan.engine import Job, ModelEngine
from ops.plan.lengths import Lengths, parse_lengths
from ops.plan.outcome import scaled, simulate
from ops.plan.speeds import Speeds
from schemas import UserError
from tests.ops.plan_twin import run_twin

SPEEDS = Speeds(
    slots=24,
    decode_base_s=0.05,
    decode_row_s=0.002,
    decode_context_s=0.0002,
    prefill_token_s=0.001,
    load_s=0.5,
    publish_s=0.3,
    train_token_s=0.004,
    train_step_s=0.4,
)
TAIL = parse_lengths("mean=40,p95=110,max=150,prompt=5")


def workload(eta: int, lengths: Lengths = TAIL, on_update: str = "recompute", **controller: object) -> Workload:
    settings = {"batch_groups": 6, "group_size": 4, "max_staleness": eta} | controller
    return Workload(lengths, ControllerConfig.model_validate(settings), on_update=on_update)  # type: ignore[arg-type]


def fixed(length: int, prompt: int = 5) -> Lengths:
    return parse_lengths(f"fixed={length},prompt={prompt}")


def batch_s(speeds: Speeds, samples: int, prompt: int, length: int) -> float:
    """Seconds in which one engine generates so many equal samples together."""
    context = samples * (prompt * length + length * (length - 1) / 2)
    steps = length * (speeds.decode_base_s + samples * speeds.decode_row_s)
    return samples * prompt * speeds.prefill_token_s + steps + context * speeds.decode_context_s


# ---- what can be computed by hand


def test_synchronous_training_on_one_device_takes_what_the_formula_says() -> None:
    found = synchronous(SPEEDS, workload(0, fixed(20)), devices=1)
    train_s = 0.4 + 24 * 25 * 0.004
    assert found.step_s == pytest.approx(batch_s(SPEEDS, 24, 5, 20) + train_s)
    assert found.tokens_per_s == pytest.approx(24 * 20 / found.step_s)


def test_a_bound_of_zero_takes_turns_exactly() -> None:
    """η = 0 is synchronous on split devices: generate, train, publish, load, and nothing at the same time."""
    steps = Cluster(SPEEDS, workload(0, fixed(20)), engines=1, train_devices=2, steps=5).run().steps
    took = np.diff([step.done_s for step in steps])
    turn_s = 0.5 + batch_s(SPEEDS, 24, 5, 20) + 0.4 + 24 * 25 * 0.004 / 2 + 0.3
    assert took == pytest.approx([turn_s] * 4)


def test_where_training_limits_a_step_takes_the_trainer_s_time() -> None:
    speeds = SPEEDS.model_copy(update={"train_token_s": 0.5})
    outcome = simulate(speeds, workload(4, fixed(20)), rollout=2, train=1)
    assert outcome.step_s == pytest.approx(0.4 + 24 * 25 * 0.5 + 0.3)
    assert outcome.trainer_idle == pytest.approx(0, abs=1e-9)


def test_where_rewards_limit_a_step_takes_their_time() -> None:
    """One reward worker, and rewards slower than all else: a server that is never idle."""
    speeds = SPEEDS.model_copy(update={"reward_s": 2.0, "reward_parallel": 1})
    outcome = simulate(speeds, workload(4, fixed(20)), rollout=2, train=2)
    assert outcome.step_s == pytest.approx(24 * 2.0)
    assert outcome.trainer_why == "rewards"


def test_one_step_of_overlap_takes_the_longer_half() -> None:
    for train_token_s in (0.001, 0.5):
        speeds = SPEEDS.model_copy(update={"train_token_s": train_token_s})
        found = one_step_overlap(speeds, workload(1, fixed(20)), engines=1, train_devices=1)
        halves = batch_s(speeds, 24, 5, 20), 0.4 + 24 * 25 * train_token_s
        assert found.step_s == pytest.approx(max(halves) + 0.3 + 0.5)


# ---- the engine against one that goes token by token


class NaiveEngine:
    """`ModelEngine`, step by step: all that is due at a step's end, then one token for everybody."""

    def __init__(self, speeds: Speeds, on_update: str) -> None:
        self.speeds, self.on_update = speeds, on_update

    def run(
        self, jobs: list[tuple[float, Job]], updates: list[tuple[float, int]]
    ) -> dict[int, tuple[float, list[int]]]:
        """By index: when the job ended, and the version of each of its tokens."""
        speeds, now_s, version = self.speeds, 0.0, 0
        waiting = sorted(jobs, key=lambda pair: pair[0])
        running: list[tuple[Job, list[int]]] = []
        done: dict[int, tuple[float, list[int]]] = {}
        while waiting or running:
            if not running:
                now_s = max(now_s, min([waiting[0][0], *(at for at, _ in updates)]))
            if updates and updates[0][0] <= now_s and not (self.on_update == "drain" and running):
                version = updates.pop(0)[1]
                now_s += speeds.load_s
                if self.on_update == "recompute":
                    now_s += sum(job.prompt + len(tokens) for job, tokens in running) * speeds.prefill_token_s
            draining = self.on_update == "drain" and updates and updates[0][0] <= now_s
            arrived_s = now_s
            while waiting and waiting[0][0] <= arrived_s and len(running) < speeds.slots and not draining:
                job = waiting.pop(0)[1]
                now_s += job.prompt * speeds.prefill_token_s
                running.append((job, []))
            came_meanwhile = bool(waiting) and waiting[0][0] <= now_s and len(running) < speeds.slots and not draining
            due = bool(updates) and updates[0][0] <= now_s and self.on_update != "drain"
            if running and not came_meanwhile and not due:
                context = sum(job.prompt + len(tokens) for job, tokens in running)
                rows = len(running)
                now_s += speeds.decode_base_s + rows * speeds.decode_row_s + context * speeds.decode_context_s
                for _, tokens in running:
                    tokens.append(version)
                for job, tokens in running:
                    if len(tokens) == job.length:
                        done[job.index] = now_s, tokens
                running = [(job, tokens) for job, tokens in running if len(tokens) < job.length]
        return done


@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=12),
    update_ticks=st.integers(100, 40_000),
    on_update=st.sampled_from(["recompute", "keep"]),
    slots=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_an_engine_that_jumps_ends_where_one_that_steps_does(
    lengths: list[tuple[int, int]], update_ticks: int, on_update: str, slots: int
) -> None:
    speeds = SPEEDS.model_copy(update={"slots": slots})
    # Never two things at one moment, since which comes first is nobody's business: steps and pauses are multiples of
    # 1e-4 seconds, and each arrival is off that grid by an amount of its own.
    jobs = [(0.0517 * at + 2e-6 * (index + 1), Job(0, index, 3, length)) for index, (at, length) in enumerate(lengths)]
    update_s = 1e-4 * update_ticks + 5e-5
    expected = NaiveEngine(speeds, on_update).run(list(jobs), [(update_s, 1)])
    engine = ModelEngine(speeds, on_update, version=0)  # type: ignore[arg-type]
    engine._since.append((0, 0))
    events = [(at, 1, job) for at, job in sorted(jobs, key=lambda pair: pair[0])]
    events = sorted([*events, (update_s, 0, None)], key=lambda event: event[:2])
    done: dict[int, tuple[float, Job]] = {}
    now_s = 0.0
    while len(done) < len(jobs):
        due_s = engine.next_s(now_s)
        if events and events[0][0] <= due_s:
            now_s, _, job = events.pop(0)
            engine.update(1) if job is None else engine.give(job)
        else:
            now_s = due_s
            done.update({job.index: (now_s, job) for job in engine.run(now_s)})
    for index, (ended_s, versions) in expected.items():
        assert [version for version, count in done[index][1].segments for _ in range(count)] == versions
        assert done[index][0] == pytest.approx(ended_s, abs=1e-6)


# ---- the model against the production actors


@pytest.mark.parametrize(
    ("eta", "on_update", "on_stale", "reward_s"),
    [
        (0, "recompute", "mask", 0.7),
        (1, "recompute", "mask", 0.0),
        (4, "recompute", "wait", 0.0),
        (4, "keep", "mask", 0.7),
        (1, "drain", "drop", 0.0),
    ],
)
def test_with_one_engine_the_model_and_the_production_actors_agree_to_the_token(
    eta: int, on_update: str, on_stale: str, reward_s: float
) -> None:
    speeds = SPEEDS.model_copy(update={"reward_s": reward_s})
    load = workload(eta, on_update=on_update, on_stale=on_stale)
    twin = run_twin(speeds, load, engines=1, train_devices=2, steps=8)
    steps = Cluster(speeds, load, engines=1, train_devices=2, steps=8).run().steps
    assert [step.done_s for step in steps] == pytest.approx([done_s for done_s, _, _ in twin], rel=1e-3)
    trained = [Counter({age: count for age, count in step.ages.items() if age <= eta}) for step in steps]
    assert trained == [ages for _, ages, _ in twin]
    assert [step.masked_tokens for step in steps] == [masked for _, _, masked in twin]


def test_with_several_engines_both_agree_nearly() -> None:
    """They give prompts to engines in another order, which no promise fixes."""
    speeds = SPEEDS.model_copy(update={"slots": 8})
    load = workload(2, filter="zero_variance")
    load = Workload(load.lengths, load.controller, uninformative=0.3)
    twin = run_twin(speeds, load, engines=3, train_devices=2, steps=12)
    steps = Cluster(speeds, load, engines=3, train_devices=2, steps=12).run().steps
    assert steps[-1].done_s == pytest.approx(twin[-1][0], rel=0.06)


@pytest.mark.parametrize("on_stale", ["mask", "drop", "wait"])
@pytest.mark.parametrize("eta", [0, 1, 3])
def test_asking_the_core_only_when_its_answer_can_change_changes_nothing(eta: int, on_stale: str) -> None:
    load = Workload(TAIL, workload(eta, on_stale=on_stale, filter="zero_variance").controller, uninformative=0.3)
    seldom, always = (Cluster(SPEEDS, load, 2, 1, steps=15, ask_always=asked).run() for asked in (False, True))
    assert seldom.steps == always.steps
    assert seldom.dropped_tokens == always.dropped_tokens


# ---- what must hold of any plan


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_every_token_generated_is_trained_or_dropped_or_waits(eta: int) -> None:
    load = Workload(TAIL, workload(eta, filter="zero_variance").controller, uninformative=0.4)
    course = Cluster(SPEEDS, load, 3, 1, steps=20).run()
    trained = sum(step.response_tokens for step in course.steps)
    assert course.generated_tokens == trained + course.dropped_tokens + course.untrained_tokens
    assert course.dropped_tokens > 0


def test_no_token_is_trained_that_is_older_than_the_bound() -> None:
    for eta in (0, 1, 2, 4):
        outcome = simulate(SPEEDS, workload(eta), rollout=3, train=2)
        assert outcome.staleness_max <= eta


def test_more_devices_are_never_slower() -> None:
    for eta in (0, 4):
        found = [simulate(SPEEDS, workload(eta), rollout=n, train=2).tokens_per_s for n in (1, 2, 4, 8)]
        assert all(more >= 0.97 * fewer for fewer, more in itertools.pairwise(found))
        # With on_stale=mask they may be: versions come faster than long answers, and more of their tokens are masked.
        load = workload(eta, on_stale="wait")
        found = [simulate(SPEEDS, load, rollout=2, train=n).tokens_per_s for n in (1, 2, 4)]
        assert all(more >= 0.97 * fewer for fewer, more in itertools.pairwise(found))


def test_a_larger_bound_never_trains_less_with_waiting() -> None:
    found = [simulate(SPEEDS, workload(eta, on_stale="wait"), rollout=2, train=2) for eta in (0, 1, 2, 4, 8)]
    rates = [outcome.tokens_per_s for outcome in found]
    assert all(more >= 0.97 * fewer for fewer, more in itertools.pairwise(rates))
    assert all(outcome.masked == 0 for outcome in found)


def test_the_same_seed_gives_the_same_plan() -> None:
    once, again = (simulate(SPEEDS, workload(4), rollout=3, train=2, seed=7) for _ in range(2))
    assert once == again
    assert once != simulate(SPEEDS, workload(4), rollout=3, train=2, seed=8)


def test_a_smaller_cluster_of_the_same_proportions_stands_for_a_large_one() -> None:
    load = workload(4, batch_groups=48, group_size=16, pace=False)
    speeds = SPEEDS.model_copy(update={"train_token_s": 0.004 / 16, "slots": 64})
    assert scaled(48, 16, 12, samples_min=256) == (16, 4)
    small = simulate(speeds, load, rollout=12, train=2, samples_min=256)
    whole = simulate(speeds, load, rollout=12, train=2, samples_min=10_000)
    assert small.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.05)
    assert small.staleness == pytest.approx(whole.staleness, abs=0.3)


def test_a_batch_that_can_never_fill_is_told() -> None:
    load = Workload(TAIL, workload(1, filter="zero_variance").controller, uninformative=1.0)
    with pytest.raises(UserError, match="Step 0 cannot be formed"):
        Cluster(SPEEDS, load, 1, 1, steps=3).run()


# ---- the shape of the paper, on a scaled-down setting


@pytest.fixture(scope="module")
def long_tailed() -> tuple[Speeds, Lengths]:
    """The 1.5B setting of arXiv 2505.24298: 128 devices, 512 x 16 samples, at most 27,648 tokens; a sixteenth of it."""
    from ops.plan.hardware import load_hardware

    lengths = parse_lengths("mean=9400,p95=24000,max=27648")
    return load_hardware("h800-1.5b").speeds_for(lengths), lengths


def test_the_order_of_the_schedules_is_that_of_the_paper(long_tailed: tuple[Speeds, Lengths]) -> None:
    speeds, lengths = long_tailed
    speeds = speeds.model_copy(update={"train_loss": 0.0})
    load = workload(8, lengths, batch_groups=32, group_size=16, pace=False)
    together = synchronous(speeds, load, devices=8).tokens_per_s
    overlap = one_step_overlap(speeds, load, engines=6, train_devices=2).tokens_per_s
    apart = simulate(speeds, load, rollout=6, train=2).tokens_per_s
    assert apart >= 2 * together
    assert together * 1.02 < overlap < apart


def test_what_a_larger_bound_gives_levels_off(long_tailed: tuple[Speeds, Lengths]) -> None:
    speeds, lengths = long_tailed
    load = {eta: workload(eta, lengths, batch_groups=16, group_size=16, pace=False) for eta in (0, 4, 16)}
    found = {eta: simulate(speeds, of, rollout=3, train=1) for eta, of in load.items()}
    consumed = {eta: 1 / outcome.step_s for eta, outcome in found.items()}
    assert consumed[4] >= 2 * consumed[0]
    assert consumed[16] <= 1.2 * consumed[4]
