"""What a cluster comes to in the long run, from a simulated stretch of it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from ops.plan.cluster import Cluster, Course, Workload
from ops.plan.speeds import Speeds
from schemas import UserError

SAMPLES_MIN = 512  # in a scaled batch: fewer, and its longest answer is no longer the real one's
GROUPS_MIN = 16
ENGINES_MIN = 1
RATIO_ERROR = 0.01  # of groups an engine, between the scaled cluster and the real one
SETTLED_STEPS = 8  # the pace moves by an eighth of a batch a step: so long without a rise, and it has found its limit
MEASURED_STEPS = 20
QUEUE_SHARE = 0.05  # of a step: a sample that waits so long for a reward worker holds the trainer up
STEPS_MAX = 240


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Steady state of `rollout` and `train` devices under the bound `max_staleness`.

    `tokens_per_s`: response tokens trained a second, masked ones not counted. Shares are of the devices' time: idle,
    updating weights (loading and prefilling again). `occupancy`: of the engines' slots, while they decode. `masked` and
    `dropped` are shares of the generated tokens, `too_old` what of both is due to age. `staleness` is in versions, over
    trained tokens.
    """

    rollout: int
    train: int
    max_staleness: int
    step_s: float
    tokens_per_s: float
    generated_per_s: float
    rollout_idle: float
    rollout_why: str
    updating: float
    occupancy: float
    trainer_idle: float
    trainer_why: str
    publishing: float
    staleness: float
    staleness_max: int
    masked: float
    dropped: float
    too_old: float
    live_batches: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def simulate(
    speeds: Speeds, workload: Workload, rollout: int, train: int, seed: int = 0, samples_min: int = SAMPLES_MIN
) -> Outcome:
    """Run a cluster until it is steady, and measure it then.

    Where it is large, a smaller one of the same proportions stands for it, of at least `samples_min` samples a batch:
    as many groups for each engine, and a trainer that takes as long for its batch.

    Raises:
        UserError: the devices cannot be split like that, or no batch can ever fill.
    """
    engines = rollout // speeds.engine_devices
    if engines < 1 or train < 1:
        raise UserError(
            f"{rollout} rollout and {train} trainer devices: an engine needs {speeds.engine_devices}, a trainer one.",
            "Give both sides enough.",
        )
    config = workload.controller
    groups, few = scaled(config.batch_groups, config.group_size, engines, samples_min)
    small = dataclasses.replace(workload, controller=config.model_copy(update={"batch_groups": groups}))
    cluster = Cluster(speeds, small, few, train, STEPS_MAX, seed, config.batch_groups / groups)
    steady = _Steady()
    course = cluster.run(steady)
    return _outcome(course, steady.since, cluster, (rollout, train))


def scaled(batch_groups: int, group_size: int, engines: int, samples_min: int = SAMPLES_MIN) -> tuple[int, int]:
    """Groups a batch and engines of the smallest cluster that stands for this one, groups for an engine kept alike."""
    for few in range(min(ENGINES_MIN, engines), engines):
        groups = round(batch_groups * few / engines)
        exact = batch_groups * few / engines
        if groups * group_size >= samples_min and groups >= GROUPS_MIN and abs(groups / exact - 1) <= RATIO_ERROR:
            return groups, few
    return batch_groups, engines


class _Steady:
    """Whether enough was seen: the limit of live groups no longer rises, and then so many steps more."""

    def __init__(self) -> None:
        self.since: int | None = None

    def __call__(self, course: Course) -> bool:
        limits = [step.live_limit for step in course.steps]
        if self.since is None and len(limits) > SETTLED_STEPS and limits[-1] <= limits[-1 - SETTLED_STEPS]:
            self.since = len(limits)
        return self.since is not None and len(limits) >= self.since + MEASURED_STEPS


def _outcome(course: Course, since: int | None, cluster: Cluster, split: tuple[int, int]) -> Outcome:
    first = since or len(course.steps) // 2
    steps = course.steps[first:]
    before, after = course.engines[first - 1], course.engines[-1]
    seconds = after.at_s - before.at_s
    engine_seconds = seconds * len(cluster.engines)
    ages: Counter[int] = Counter()
    for step in steps:
        ages.update(step.ages)
    bound = cluster.core.config.max_staleness
    trained = {age: count for age, count in ages.items() if age <= bound}
    tokens = sum(trained.values())
    decoding = after.decode_s - before.decode_s
    filling = after.prefill_s - before.prefill_s
    updating = after.update_s - before.update_s
    idle = max(0.0, 1 - (decoding + filling + updating) / engine_seconds)
    queue_s = course.reward_queue_s / max(1, course.samples)
    queued = queue_s > max(cluster.speeds.reward_s, QUEUE_SHARE * seconds / len(steps))
    decode_steps = max(1, after.steps - before.steps)
    generated = after.row_steps - before.row_steps
    dropped = course.dropped_tokens / max(1, course.generated_tokens)
    masked = sum(step.masked_tokens for step in steps) / max(1, sum(ages.values()))
    return Outcome(
        rollout=split[0],
        train=split[1],
        max_staleness=bound,
        step_s=seconds / len(steps),
        tokens_per_s=tokens * cluster.scale / seconds,
        generated_per_s=generated * cluster.scale / seconds,
        rollout_idle=idle,
        rollout_why=max(course.idle_why, key=lambda why: course.idle_why[why], default="nothing"),
        updating=updating / engine_seconds,
        occupancy=generated / decode_steps / cluster.speeds.slots,
        trainer_idle=sum(step.waited_s for step in steps) / seconds,
        trainer_why="rewards" if queued else "rollouts",
        publishing=sum(step.publishing_s for step in steps) / seconds,
        staleness=sum(age * count for age, count in trained.items()) / max(1, tokens),
        staleness_max=max(trained, default=0),
        masked=masked,
        dropped=dropped,
        too_old=masked + course.stale_tokens / max(1, course.generated_tokens),
        live_batches=steps[-1].live_limit / cluster.core.config.batch_groups,
    )
