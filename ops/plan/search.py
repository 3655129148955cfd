"""How to split the devices, and what each staleness bound is worth: the simulations behind a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ops.plan.baselines import BatchSchedule, best_overlap, synchronous
from ops.plan.cluster import Workload
from ops.plan.outcome import Outcome, simulate
from ops.plan.speeds import Speeds
from schemas import UserError

PARTS = 16  # the devices are dealt out in so many parts, where there are more than that
BESIDE = 2  # splits tried on each side of the one at which both sides could do as much
SEARCH_SAMPLES = 256
ALIKE = 0.02  # of the throughput: differences below are noise of a simulation of a few dozen steps
MASKED = 0.02  # of the tokens masked or dropped, from which on it is looked at how waiting does
ENOUGH = 0.95  # of what the largest bound gives

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """`splits` under `reference` (η), best first; `bounds`: the best of them under each η, in order.

    `waiting` is what is advised, with `on_stale: wait`, where the bound would mask tokens.
    """

    devices: int
    workload: Workload
    speeds: Speeds
    reference: int
    splits: list[Outcome]
    bounds: list[Outcome]
    synchronous: BatchSchedule
    overlap: BatchSchedule
    overlap_split: tuple[int, int]
    waiting: Outcome | None = None

    @property
    def best(self) -> Outcome:
        """The best split under the reference bound."""
        return self.splits[0]

    def bounds_at(self, bound: int) -> Outcome:
        """The best split under this η, which is one of `bounds`."""
        return next(outcome for outcome in self.bounds if outcome.max_staleness == bound)

    def speedup(self, outcome: Outcome) -> float:
        """Over the synchronous schedule on all devices."""
        return outcome.tokens_per_s / self.synchronous.tokens_per_s

    @property
    def advised(self) -> Outcome:
        """The smallest bound that gives nearly as much as any."""
        most = max(outcome.tokens_per_s for outcome in self.bounds)
        return next(outcome for outcome in self.bounds if outcome.tokens_per_s >= ENOUGH * most)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for programs."""
        return {
            "devices": self.devices,
            "reference_staleness": self.reference,
            "lengths": self.workload.lengths.describe(),
            "speeds": self.speeds.model_dump(),
            "advice": {"split": [self.advised.rollout, self.advised.train], "staleness": self.advised.max_staleness},
            "splits": [outcome.to_json() | {"speedup": self.speedup(outcome)} for outcome in self.splits],
            "bounds": [outcome.to_json() | {"speedup": self.speedup(outcome)} for outcome in self.bounds],
            "synchronous": _json_of(self.synchronous),
            "one_step_overlap": _json_of(self.overlap) | {"split": self.overlap_split},
            "waiting": self.waiting.to_json() | {"speedup": self.speedup(self.waiting)} if self.waiting else None,
        }


def make_plan(
    speeds: Speeds,
    workload: Workload,
    devices: int,
    bounds: Sequence[int],
    reference: int,
    split: tuple[int, int] | None = None,
    seed: int = 0,
    progress: Progress = lambda what: None,
) -> Plan:
    """Find the best split under the bound `reference`, or take `split`, and simulate it under all `bounds`.

    Raises:
        UserError: no split of so few devices, or one that is none of them.
    """
    candidates = splits_of(devices, speeds.engine_devices)
    if split is not None:
        check_split(split, devices, speeds.engine_devices)
        candidates = [split]
    if not candidates:
        raise UserError(
            f"{devices} device(s) cannot be split: an engine needs {speeds.engine_devices}, and the trainer one.",
            "Plan for more devices.",
        )
    progress(f"synchronous on {devices}")
    together = synchronous(speeds, workload, devices, seed)
    overlap_split, overlap = best_overlap(speeds, workload, near(candidates, speeds, workload), seed)
    found = _search(speeds, with_bound(workload, reference), candidates, seed, progress)
    best = (found[0].rollout, found[0].train)
    outcomes = []
    for bound in sorted(set(bounds)):
        progress(f"{best[0]}:{best[1]} with η = {bound}")
        outcomes.append(simulate(speeds, with_bound(workload, bound), *best, seed))
    plan = Plan(devices, workload, speeds, reference, found, outcomes, together, overlap, overlap_split)
    advised = plan.advised
    if advised.too_old < MASKED or workload.controller.on_stale == "wait":
        return plan
    progress(f"{best[0]}:{best[1]} with η = {advised.max_staleness}, waiting")
    config = with_bound(workload, advised.max_staleness).controller.model_copy(update={"on_stale": "wait"})
    return dataclasses.replace(
        plan, waiting=simulate(speeds, dataclasses.replace(workload, controller=config), *best, seed)
    )


def with_bound(workload: Workload, bound: int) -> Workload:
    """The same under another η."""
    config = workload.controller.model_copy(update={"max_staleness": bound})
    return dataclasses.replace(workload, controller=config)


def splits_of(devices: int, engine_devices: int) -> list[tuple[int, int]]:
    """(rollout, trainer) devices to consider: whole engines, in steps of about a sixteenth of the devices."""
    step = engine_devices * max(1, round(devices / PARTS / engine_devices))
    return [(rollout, devices - rollout) for rollout in range(step, devices, step)]


def check_split(split: tuple[int, int], devices: int, engine_devices: int) -> None:
    """Raises `UserError` if these are not all the devices, or not whole engines."""
    rollout, train = split
    if rollout < 1 or train < 1:
        raise UserError(f"--split {rollout}:{train}: both sides need devices.", "Write for instance --split 48:16.")
    if rollout + train != devices:
        raise UserError(
            f"--split {rollout}:{train} makes {rollout + train} devices, but --devices is {devices}.",
            "Let them agree.",
        )
    if rollout % engine_devices:
        raise UserError(
            f"--split {rollout}:{train}: an engine takes {engine_devices} devices, and {rollout} is no multiple.",
            f"Take {rollout // engine_devices * engine_devices or engine_devices} rollout devices.",
        )


def near(candidates: list[tuple[int, int]], speeds: Speeds, workload: Workload) -> list[tuple[int, int]]:
    """The candidates around the one at which generation and training could do the same, were nobody to wait."""
    best = max(range(len(candidates)), key=lambda number: _capacity(candidates[number], speeds, workload))
    return candidates[max(0, best - BESIDE) : best + BESIDE + 1]


def _capacity(split: tuple[int, int], speeds: Speeds, workload: Workload) -> float:
    """Response tokens a second at best: full engines, a trainer that never waits."""
    lengths, config = workload.lengths, workload.controller
    rows = speeds.slots
    step_s = speeds.decode_base_s + rows * (speeds.decode_row_s + speeds.decode_context_s * lengths.running_context)
    samples = config.batch_groups * config.group_size
    train_s = speeds.train_s(samples * (lengths.mean + lengths.prompt), split[1]) + speeds.publish_s
    return min(split[0] // speeds.engine_devices * rows / step_s, samples * lengths.mean / train_s)


def _search(
    speeds: Speeds, workload: Workload, candidates: list[tuple[int, int]], seed: int, progress: Progress
) -> list[Outcome]:
    """Simulate the promising splits, and on to where it still rises; best first, of equals the one that idles less."""
    done: dict[tuple[int, int], Outcome] = {}
    todo = near(candidates, speeds, workload)
    while todo:
        for split in todo:
            progress(f"{split[0]}:{split[1]}")
            done[split] = simulate(speeds, workload, *split, seed, SEARCH_SAMPLES)
        top = candidates.index(max(done, key=lambda split: done[split].tokens_per_s))
        todo = [split for split in candidates[max(0, top - 1) : top + 2] if split not in done]
    return sorted(done.values(), key=lambda outcome: -outcome.tokens_per_s)


def _json_of(schedule: BatchSchedule) -> dict[str, Any]:
    return dataclasses.asdict(schedule) | {"tokens_per_s": schedule.tokens_per_s}
