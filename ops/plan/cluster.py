"""A cluster in virtual time: the production controller decides, engines, rewards and the trainer are models.

The controller's core is the real one, told the facts at the moments at which they would happen; so admission, pacing,
the order of batches, masks and filters are those of a run. Prompts go one at a time to the workers that have room, in
turn, as the log gives them out. What the log itself costs is left out: it is milliseconds where steps take seconds.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import cast

import numpy as np

from actors.controller.config import ControllerConfig
from actors.controller.core import ControllerCore
from ops.plan.engine import Job, ModelEngine, OnUpdate
from ops.plan.lengths import Lengths
from ops.plan.speeds import Speeds
from schemas import Batch, Dropped, Scored, Segments, UserError
from schemas.fields import FloatArray, IntArray

HOPELESS_BATCHES = 100  # generated since the last step, and no step to be seen


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is to be generated and trained.

    `uninformative` is the share of groups whose rewards are all equal, which the filter `zero_variance` drops.
    """

    lengths: Lengths
    controller: ControllerConfig
    uninformative: float = 0.0
    on_update: OnUpdate = "recompute"

    def group(self, seed: int, group_id: int) -> tuple[list[int], bool]:
        """The lengths of a group's samples, and whether their rewards are all equal: the same whenever asked."""
        generator = np.random.default_rng([seed, 1, group_id])
        lengths = self.lengths.draw(generator, self.controller.group_size).tolist()
        return lengths, bool(generator.random() < self.uninformative)


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """A trained step. Times in seconds since the start; tokens of responses, unless said otherwise.

    `ages[k]` tokens were k versions old. `trained_tokens` counts prompts too and tokens that are masked, since they
    cost time. `waited_s` is how long the trainer had nothing to do before it, `live_limit` how many groups the pace
    allowed then.
    """

    done_s: float
    trained_tokens: int
    response_tokens: int
    masked_tokens: int
    ages: Counter[int]
    waited_s: float
    training_s: float
    publishing_s: float
    live_limit: int


@dataclasses.dataclass(frozen=True)
class EngineSeconds:
    """What all engines together did until some moment, in engine-seconds; see `ModelEngine`."""

    at_s: float
    decode_s: float
    prefill_s: float
    update_s: float
    steps: int
    row_steps: int


@dataclasses.dataclass
class Course:
    """What happened: `steps` in order, and after each of them what the engines had done.

    `idle_why` counts by cause how often an engine ran empty, `reward_queue_s` sums up how long the `samples` had to
    wait for a reward worker. Of the `generated_tokens` of finished samples `dropped_tokens` ended untrained,
    `stale_tokens` of them for their age; `untrained_tokens` wait.
    """

    steps: list[StepRecord]
    engines: list[EngineSeconds]
    idle_why: Counter[str]
    generated_tokens: int = 0
    dropped_tokens: int = 0
    stale_tokens: int = 0
    untrained_tokens: int = 0
    reward_queue_s: float = 0.0
    samples: int = 0


_NONE: FloatArray = np.zeros(0, "<f4")
_ALL_MADE: IntArray = np.zeros(0, "<i4")


@dataclasses.dataclass(frozen=True, slots=True)
class _Scored:
    """What the core reads of a `Scored`, without the checks that a message from the wire needs: a third of the time."""

    group_id: int
    index: int
    rollout_seq: int
    segments: Segments
    length: int
    reward: float
    prompt_length: int = 0  # only tells ranks of a trainer their shares, and there are none here
    verdict: str = "scored"
    detail: str = ""
    token_rewards: FloatArray = dataclasses.field(default_factory=lambda: _NONE)  # the model knows no process rewards
    reward_digest: str = ""
    observations: IntArray = dataclasses.field(default_factory=lambda: _ALL_MADE)  # nor tokens of others

    @property
    def made(self) -> int:
        """Tokens of the model's own."""
        return self.length


class Cluster:
    """`engines` engines and a trainer of `train_devices` devices. `scale`: how many real samples each stands for.

    With `ask_always` the core is asked after every event; without, only when its answer can have changed, which comes
    to the same.
    """

    def __init__(
        self,
        speeds: Speeds,
        workload: Workload,
        engines: int,
        train_devices: int,
        steps: int,
        seed: int = 0,
        scale: float = 1.0,
        ask_always: bool = False,
    ) -> None:
        config = workload.controller
        self.speeds = speeds
        self.workload = workload
        self.steps = steps
        self.scale = scale
        self.train_devices = train_devices
        # Admission ends with the last step; what is looked at must lie well before.
        self.core = ControllerCore(config, steps + config.max_staleness + 2)
        self.engines = [ModelEngine(speeds, workload.on_update) for _ in range(engines)]
        self.course = Course([], [], Counter())
        self.now_s = 0.0
        self._always = ask_always
        self._seed = seed
        self._rewards = np.random.default_rng([seed, 2])
        self._equal: dict[int, bool] = {}  # of live groups: are all their rewards equal?
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._due: list[float] = [math.inf] * engines  # when each engine is to be run
        self._queue: deque[Job] = deque()
        room = speeds.slots + max(1, speeds.slots // 8)  # as the production worker takes a few more than it decodes
        self._room = [room] * engines
        self._with_room: deque[int] = deque(range(engines))
        self._samples: dict[tuple[int, int], Job] = {}  # finished, not yet trained
        self._left: dict[int, int] = {}  # samples of a group that are still on their way
        self._ready = 0  # complete groups
        self._scored_seq = 0
        self._reward_free = [0.0] * max(1, round(speeds.reward_parallel / scale))
        self._batches: deque[Batch] = deque()
        self._training = False
        self._in_training = 0  # tokens of the step in hand
        self._idle_since = 0.0

    def run(self, enough: Callable[[Course], bool] = lambda course: False) -> Course:
        """From version 0 until all steps are trained, or until after some step it is `enough`.

        Raises:
            UserError: nothing is left that could happen, so no batch will ever fill.
        """
        self._new_version(0)
        samples = self.core.config.batch_groups * self.core.config.group_size
        before = 0
        while (done := len(self.course.steps)) < self.steps:
            if not self._events or self.course.samples - before > HOPELESS_BATCHES * samples:
                raise UserError(
                    f"Step {done} cannot be formed: {self.course.samples - before} samples were generated since the "
                    f"step before, and no batch of {samples} fills.",
                    "Lower the share of uninformative groups, raise η, or take another controller.on_stale.",
                )
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()
            if len(self.course.steps) > done:
                before = self.course.samples
                if enough(self.course):
                    break
        self.course.untrained_tokens = self._in_training + sum(job.length for job in self._samples.values())
        return self.course

    # --- time

    def _at(self, when_s: float, happen: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when_s, self._order, happen))

    def _schedule(self, number: int) -> None:
        """Run an engine when it is due; an earlier appointment is void."""
        due_s = self.engines[number].next_s(self.now_s)
        if due_s != self._due[number]:
            self._due[number] = due_s
            if due_s < math.inf:
                self._at(due_s, lambda: self._run_engine(number, due_s))

    def _run_engine(self, number: int, due_s: float) -> None:
        if self._due[number] != due_s:
            return
        self._due[number] = math.inf
        engine = self.engines[number]
        for job in engine.run(self.now_s):
            self.course.generated_tokens += job.length
            self.course.samples += 1
            if self._room[number] == 0:
                self._with_room.append(number)
            self._room[number] += 1
            self._reward(job)
        self._hand_out()
        if not engine.running and not engine.waiting:
            self.course.idle_why[self._why_no_prompts()] += 1
        self._schedule(number)

    # --- prompts

    def _admit(self, group_id: int, indices: tuple[int, ...], min_version: int) -> None:
        lengths, self._equal[group_id] = self.workload.group(self._seed, group_id)
        self._left[group_id] = len(lengths)
        for index in indices:
            self._queue.append(Job(group_id, index, self.workload.lengths.prompt, lengths[index], min_version))

    def _hand_out(self) -> None:
        touched = set()
        while self._queue and self._with_room:
            number = self._with_room.popleft()
            self.engines[number].give(self._queue.popleft())
            self._room[number] -= 1
            if self._room[number]:
                self._with_room.append(number)
            touched.add(number)
        for number in sorted(touched):
            self._schedule(number)

    def _why_no_prompts(self) -> str:
        core = self.core
        if len(core.live) + core.next_step * core.config.batch_groups >= core.bound:
            return "staleness bound"
        return "pace"

    # --- rewards

    def _reward(self, job: Job) -> None:
        if not self.speeds.reward_s:
            self._scored(job)
            return
        self.course.reward_queue_s += max(0.0, self._reward_free[0] - self.now_s)
        sigma = self.speeds.reward_sigma
        took_s = self.speeds.reward_s * math.exp(sigma * self._rewards.standard_normal() - sigma * sigma / 2)
        done_s = max(self.now_s, heapq.heappop(self._reward_free)) + took_s
        heapq.heappush(self._reward_free, done_s)
        self._at(done_s, lambda: self._scored(job))

    def _scored(self, job: Job) -> None:
        group_id, core = job.group_id, self.core
        if group_id not in core.live:
            self.course.dropped_tokens += job.length
            return
        self._samples[group_id, job.index] = job
        self._scored_seq += 1
        equal = self._equal[group_id]
        reward = 1.0 if equal else float(job.index % 2)
        scored = _Scored(group_id, job.index, self._scored_seq, job.segments, job.length, reward)
        core.saw_scored(self._scored_seq, cast(Scored, scored))
        self._left[group_id] -= 1
        if self._left[group_id] == 0:
            self._ready += 1
        if self._always or (self._left[group_id] == 0 and self._may_decide(group_id, equal)):
            self._decide()

    # --- decisions

    def _may_decide(self, group_id: int, equal: bool) -> bool:
        """Whether a group that became complete can change what the core decides: it is filtered, too old, or fills a
        batch.
        """
        core, config = self.core, self.core.config
        if equal and config.filter == "zero_variance":
            return True
        group = core.live[group_id]
        stale = group.stale_at(core.next_step, config.max_staleness, whole_sample=config.on_stale == "drop")
        if len(stale) > group.size - group.fewest:
            return True
        return self._ready >= core.config.batch_groups and core.newest_version >= core.next_step - 1

    def _decide(self) -> None:
        core = self.core
        core.unbegun_prompts = len(self._queue)
        while decision := core.decide():
            for admission in decision.admissions:
                self._admit(admission.group_id, admission.indices, admission.min_version)
            for dropped in decision.drops:
                self._forget(dropped)
            if decision.batch is not None:
                self._batches.append(decision.batch)
            if decision.drops or decision.batch is not None:
                self._ready = core.ready_groups
            self._hand_out()
            core.unbegun_prompts = len(self._queue)
        self._train()

    def _forget(self, dropped: Dropped) -> None:
        job = self._samples.pop((dropped.group_id, dropped.index), None)
        if job is not None:
            self.course.dropped_tokens += job.length
            self.course.stale_tokens += job.length if dropped.reason == "stale" else 0
        self._end(dropped.group_id)

    def _end(self, group_id: int) -> None:
        self._equal.pop(group_id, None)
        self._left.pop(group_id, None)

    # --- training

    def _train(self) -> None:
        if self._training or not self._batches:
            return
        self._training = True
        batch = self._batches.popleft()
        keys = zip(batch.group_ids.tolist(), batch.indices.tolist(), strict=True)
        jobs = [self._samples.pop(key) for key in keys]
        ages: Counter[int] = Counter()
        for job in jobs:
            for version, count in job.segments:
                ages[batch.step - version] += count
        for group_id in set(batch.group_ids.tolist()):
            self._end(group_id)
        response = self._in_training = sum(ages.values())
        tokens = response + sum(job.prompt for job in jobs)
        masked = sum(count for age, count in ages.items() if age > batch.max_staleness)
        training_s = self.speeds.train_s(tokens * self.scale, self.train_devices)
        waited_s = self.now_s - self._idle_since
        done_s = self.now_s + training_s + self.speeds.publish_s
        record = StepRecord(
            done_s, tokens, response, masked, ages, waited_s, training_s, self.speeds.publish_s, self.core.pace.limit
        )
        self._at(done_s, lambda: self._trained(record, batch.step + 1))

    def _trained(self, record: StepRecord, version: int) -> None:
        self._training = False
        self._in_training = 0
        self._idle_since = self.now_s
        self.course.steps.append(record)
        self.course.engines.append(
            EngineSeconds(
                self.now_s,
                sum(engine.decode_s for engine in self.engines),
                sum(engine.prefill_s for engine in self.engines),
                sum(engine.update_s for engine in self.engines),
                sum(engine.steps for engine in self.engines),
                sum(engine.row_steps for engine in self.engines),
            )
        )
        self._new_version(version)

    def _new_version(self, version: int) -> None:
        for number, engine in enumerate(self.engines):
            engine.update(version)
            self._schedule(number)
        self.core.saw_weights(version)
        self._decide()
