"""What a person sees of a run, as a fold over its messages and beats. No bus, no clock, no drawing.

`RunView` takes `StepDone`, `Batch`, `Dropped` and `Evaluation` messages and the beats of actors, in any order, with the
Unix time at which they came about; `ops.screen` draws it, `ops.summary` sums it up. Beats are plain data from other
machines, so a missing or odd gauge is left out and never raises.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from actors.evaluator.best import best_of
from ops.drops import Drops
from schemas import Batch, Dropped, Evaluation, StepDone

SILENT_AFTER_S = 5.0  # beats come every second
RATE_WINDOW_S = 10.0
METRICS_KEPT = ("entropy", "grad_norm", "clip_fraction", "mismatch_kl", "lr", "loss")  # a run may have 100,000 steps
ROLES = ("controller", "episode", "rollout", "reward", "trainer", "evaluator", "nats", "launcher")


@dataclasses.dataclass(frozen=True, slots=True)
class Achieved:
    """What the samples that ended for a batch achieved: mean reward, mean length in tokens."""

    reward: float
    length: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class StepPoint:
    """One training step. `achieved` is what its batch tells, None while the batch has not been seen.

    `metrics` are those of `METRICS_KEPT`, and `reward_mean`, as far as the trainer told them. `staleness[i]` trained
    tokens were i versions old. `cpu_s` is what all processes had used when the step was seen,
    `generated` what all workers had generated.
    """

    step: int
    time_s: float
    achieved: Achieved | None
    metrics: Mapping[str, float]
    staleness: tuple[int, ...]
    cpu_s: float
    generated: int

    @property
    def reward(self) -> float | None:
        """Mean reward of the samples that ended for this step, those in dropped groups included."""
        return self.achieved.reward if self.achieved else self.metrics.get("reward_mean")

    @property
    def length(self) -> float | None:
        """Mean response length of the same samples, in tokens."""
        return self.achieved.length if self.achieved else None

    @property
    def staleness_mean(self) -> float:
        """Mean age in versions of the trained tokens, 0 if there was none."""
        return mean_staleness(self.staleness)

    @property
    def staleness_max(self) -> int:
        """Age in versions of the oldest trained token, 0 if there was none."""
        return max((age for age, tokens in enumerate(self.staleness) if tokens), default=0)

    @property
    def tokens(self) -> int:
        """Response tokens trained in this step."""
        return sum(self.staleness)


@dataclasses.dataclass(slots=True)
class ActorView:
    """One actor, as its beats tell. `idle_s` of `watched_s` seconds it was idle, by reason in `idle_why_s`."""

    actor: str
    role: str
    process: str
    heard_s: float
    state: str = ""
    idle_share: float | None = None
    idle_why: str = ""
    gauges: dict[str, float] = dataclasses.field(default_factory=dict)
    watched_s: float = 0.0
    idle_s: float = 0.0
    idle_why_s: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether it has said goodbye."""
        return self.state == "ended"

    def silent(self, now_s: float) -> bool:
        """Whether it has not been heard for longer than a late beat explains, and has not said goodbye."""
        return not self.ended and now_s - self.heard_s > SILENT_AFTER_S

    @property
    def idle_share_overall(self) -> float | None:
        """Idle share of all the time that its beats cover; None before the second beat."""
        return self.idle_s / self.watched_s if self.watched_s else None

    @property
    def idle_why_mostly(self) -> str:
        """The reason for most of its idle time."""
        return max(self.idle_why_s, key=lambda why: self.idle_why_s[why], default="")


@dataclasses.dataclass(slots=True)
class ProcessView:
    """One process: its CPU seconds so far and the actors that it hosts."""

    cpu_s: float = 0.0
    actors: set[str] = dataclasses.field(default_factory=set)


class RunView:
    """The fold. `steps` is how many the recipe asks for, `max_staleness` its η, `batch_samples` the samples a batch."""

    def __init__(self, run: str, steps: int, max_staleness: int, batch_samples: int, started_s: float) -> None:
        self.run = run
        self.steps = steps
        self.max_staleness = max_staleness
        self.batch_samples = batch_samples
        self.started_s = started_s
        self.points: dict[int, StepPoint] = {}
        self.drops = Drops()
        self.actors: dict[str, ActorView] = {}
        self.processes: dict[str, ProcessView] = {}
        self._evaluations: dict[str, dict[int, Evaluation]] = {}  # by set, then by version
        self._eval_set = ""  # of the newest
        self.generated = 0  # tokens, by all workers, restarts included
        self._achieved: dict[int, Achieved] = {}
        self._generation: deque[tuple[float, int]] = deque()

    # ---- taking in

    def step_done(self, message: StepDone, time_s: float) -> None:
        """Take a finished step. The first report of a step counts; a trainer that recovers reports it again."""
        if message.step in self.points:
            return
        told = message.metrics
        self.points[message.step] = StepPoint(
            step=message.step,
            time_s=time_s,
            achieved=self._achieved.get(message.step),
            metrics={name: told[name] for name in (*METRICS_KEPT, "reward_mean") if name in told},
            staleness=tuple(int(count) for count in message.staleness),
            cpu_s=self.cpu_s,
            generated=self.generated,
        )

    def batch(self, message: Batch) -> None:
        """Take a batch. With a filter it holds selected groups only: `seen`, over all that ended, is what counts."""
        seen = message.seen
        if seen.get("samples") and "reward" in seen:
            achieved = Achieved(seen["reward"], seen.get("response_length"))
        elif len(message.rewards):
            achieved = Achieved(float(message.rewards.mean()), None)
        else:
            return
        self._achieved[message.step] = achieved
        if (point := self.points.get(message.step)) is not None:
            self.points[message.step] = dataclasses.replace(point, achieved=achieved)

    def drop(self, message: Dropped, time_s: float) -> None:
        """Take a sample that ended without being trained."""
        self.drops.take(message, before=time_s < self.started_s)

    def evaluated(self, message: Evaluation) -> None:
        """Take an evaluation. The first of a version counts."""
        self._eval_set = message.data
        self._evaluations.setdefault(message.data, {}).setdefault(message.version, message)

    def beat(self, beat: Mapping[str, Any], time_s: float) -> None:
        """Take an actor's beat. Without the actor's name it is nobody's and is left out."""
        name = _text(beat.get("actor"))
        if not name:
            return
        gauges = {key: float(value) for key, value in beat.items() if _is_number(value)}
        before = self.actors.get(name)
        process = _text(beat.get("process")) or name
        role = _text(beat.get("role")) or name.rpartition("-")[0] or name
        idle = gauges.get("idle_share")
        after = ActorView(
            actor=name,
            role=role,
            process=process,
            heard_s=time_s,
            state=_text(beat.get("state")),
            idle_share=None if idle is None else min(1.0, max(0.0, idle)),
            idle_why=_text(beat.get("idle_why")),
            gauges=gauges,
        )
        if before is not None:
            self._carry_on(before, after)
        self.actors[name] = after
        host = self.processes.setdefault(process, ProcessView())
        host.actors.add(name)
        host.cpu_s = max(host.cpu_s, gauges.get("cpu_s", 0.0))
        self._count_generated(before, after)

    def _carry_on(self, before: ActorView, after: ActorView) -> None:
        after.watched_s, after.idle_s, after.idle_why_s = before.watched_s, before.idle_s, before.idle_why_s
        span = after.heard_s - before.heard_s
        # After a silence the actor was restarted or cut off: its beat says nothing about that time.
        if after.idle_share is None or not 0.0 < span <= SILENT_AFTER_S:
            return
        after.watched_s += span
        after.idle_s += span * after.idle_share
        if after.idle_why and after.idle_share > 0:
            after.idle_why_s[after.idle_why] = after.idle_why_s.get(after.idle_why, 0.0) + span * after.idle_share

    def _count_generated(self, before: ActorView | None, after: ActorView) -> None:
        now = int(after.gauges.get("tokens_generated", 0))
        same_process = before is not None and before.process == after.process
        then = int(before.gauges.get("tokens_generated", 0)) if before is not None and same_process else 0
        self.generated += max(0, now - then)
        self._generation.append((after.heard_s, self.generated))
        while len(self._generation) > 1 and self._generation[0][0] < after.heard_s - RATE_WINDOW_S:
            self._generation.popleft()

    # ---- looking at it

    @property
    def evaluations(self) -> dict[int, Evaluation]:
        """The evaluations by version, in ascending order; after a change of the set, those on the newest set."""
        return dict(sorted(self._evaluations.get(self._eval_set, {}).items()))

    @property
    def evals(self) -> list[tuple[int, float]]:
        """Versions and their held-out rewards, without those of which no problem was scored."""
        return [(version, one.reward) for version, one in self.evaluations.items() if one.reward is not None]

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the highest reward, of equal ones the first; None if there is none with a reward."""
        return best_of(self.evaluations.values())

    @property
    def series(self) -> list[StepPoint]:
        """The steps so far, in order."""
        return [self.points[step] for step in sorted(self.points)]

    @property
    def session(self) -> list[StepPoint]:
        """The steps since this start of the run; those before a resume are left out. Rates and costs are over these."""
        return [point for point in self.series if point.time_s >= self.started_s]

    @property
    def last(self) -> StepPoint | None:
        """The newest step."""
        return self.points[max(self.points)] if self.points else None

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes ever heard of, those that have ended included."""
        return sum(process.cpu_s for process in self.processes.values())

    @property
    def dropped(self) -> dict[str, int]:
        """Samples that ended without being trained, by reason, the most frequent first."""
        return dict(self.drops.count.most_common())

    @property
    def staleness(self) -> list[int]:
        """Trained tokens by age in versions, over the whole run."""
        total = [0] * max((len(point.staleness) for point in self.points.values()), default=0)
        for point in self.points.values():
            for age, count in enumerate(point.staleness):
                total[age] += count
        return total

    def generated_per_s(self) -> float | None:
        """Tokens generated a second over the last seconds, all workers together; None before two beats."""
        return _rate(self._generation)

    def trained_per_s(self, steps: int = 8) -> float | None:
        """Response tokens trained a second over the last `steps` steps; None before two steps."""
        recent = self.session[-steps - 1 :]
        seconds = recent[-1].time_s - recent[0].time_s if len(recent) > 1 else 0.0
        return sum(point.tokens for point in recent[1:]) / seconds if seconds > 0 else None

    def remaining_s(self, now_s: float, steps: int = 16) -> float | None:
        """Seconds until the last step at the pace of the last `steps`; None before two steps."""
        recent = self.session[-steps - 1 :]
        if len(recent) < 2:
            return None
        pace = (recent[-1].time_s - recent[0].time_s) / (len(recent) - 1)
        left = self.steps - 1 - recent[-1].step
        return max(0.0, left * pace - max(0.0, now_s - recent[-1].time_s)) if left > 0 else 0.0

    def gauge(self, role: str, name: str, now_s: float) -> float | None:
        """A gauge summed over the role's actors that are alive; None if none of them tells it."""
        values = [
            actor.gauges[name]
            for actor in self.actors.values()
            if actor.role == role and name in actor.gauges and not (actor.ended or actor.silent(now_s))
        ]
        return sum(values) if values else None

    def by_role(self) -> list[ActorView]:
        """The actors in the order of the flow, then by name."""
        order = {role: place for place, role in enumerate(ROLES)}
        return sorted(
            self.actors.values(), key=lambda actor: (order.get(actor.role, len(order)), _natural(actor.actor))
        )

    def cpu_by_actor(self) -> dict[str, float]:
        """CPU seconds by the actors that share a process, restarts added up: `{"controller + reward-1": 12.5, ...}`."""
        groups: list[tuple[set[str], float]] = []
        for process in self.processes.values():
            # A process that died early may not have told all its actors: whoever ever shared one belongs together.
            names, seconds = set(process.actors), process.cpu_s
            for group in [group for group in groups if group[0] & names]:
                groups.remove(group)
                names |= group[0]
                seconds += group[1]
            groups.append((names, seconds))
        order = {actor.actor: place for place, actor in enumerate(self.by_role())}
        labelled = {" + ".join(sorted(names, key=order.__getitem__)): seconds for names, seconds in groups}
        return dict(sorted(labelled.items(), key=lambda item: -item[1]))


def mean_staleness(histogram: Sequence[int]) -> float:
    """Mean age of tokens, `histogram[i]` of which are i versions old; 0 if there is none."""
    return sum(age * count for age, count in enumerate(histogram)) / max(1, sum(histogram))


def running_mean(values: Sequence[float], width: int = 5) -> list[float]:
    """The mean of each value and the `width - 1` before it, fewer at the start; as long as `values`."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(width, i + 1) for i in range(len(values))]


def _rate(samples: Sequence[tuple[float, int]]) -> float | None:
    if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
        return None
    return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])


def _text(value: Any) -> str:
    return value[:200] if isinstance(value, str) else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _natural(name: str) -> tuple[str, int]:
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdecimal() else (name, 0)
