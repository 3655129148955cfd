"""A model of an engine that decodes in a continuous batch: it computes when its sequences end, token by token exactly,
but jumps from one event to the next.

All running sequences get one token a step. A step takes `base + row * sequences + context * tokens in their caches`
seconds, so k steps without an event take an arithmetic series, and what happens in between waits for a step's end. A
sequence that joins is prefilled first, while the others stand still; new weights stop all.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from typing import Literal

from ops.plan.speeds import Speeds

OnUpdate = Literal["recompute", "keep", "drain"]
Runs = tuple[tuple[int, int], ...]  # (version, tokens)


@dataclasses.dataclass(slots=True)
class Job:
    """A sample on its way: `length` tokens after `prompt` ones, none of them from a version below `min_version`."""

    group_id: int
    index: int
    prompt: int
    length: int
    min_version: int = 0
    segments: Runs = ()  # once it is finished
    _joined: int = 0


class ModelEngine:
    """One engine. Time only moves in `run`, which the caller calls at `next_s` and whenever something was given.

    Seconds by what they were spent on: `decode_s`, `prefill_s` (of prompts), `update_s` (loading weights and prefilling
    again); what is left of the time it was idle. `row_steps / steps` is the mean number of sequences decoded together.
    """

    def __init__(self, speeds: Speeds, on_update: OnUpdate = "recompute", version: int = -1) -> None:
        self.speeds = speeds
        self.on_update = on_update
        self.version = version
        self.waiting: deque[Job] = deque()
        self.decode_s = self.prefill_s = self.update_s = 0.0
        self.steps = self.row_steps = 0
        self._at_s = 0.0  # the state below holds at this time, which may lie ahead: the end of a pause
        self._context = 0  # tokens in the caches of the running sequences
        self._running: list[tuple[int, int, Job]] = []  # a heap by the step at which they end
        self._pushed = 0
        self._coming: int | None = None  # a version to be loaded
        self._later: int | None = None  # the worker waits for the first before it hands over the next
        self._since: list[tuple[int, int]] = []  # (version, first step under it)

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    def give(self, job: Job) -> None:
        """A sample to generate; `run` lets it in."""
        self.waiting.append(job)

    def update(self, version: int) -> None:
        """Weights to load; `run` loads them. Of those that come while an engine drains, the newest is next."""
        if self.on_update == "drain" and self._coming is not None:
            self._later = version
        else:
            self._coming = version

    def next_s(self, now_s: float) -> float:
        """When `run` is due, not before `now_s`; infinity if nothing will happen by itself."""
        if self._at_s > now_s:
            now_s = self._at_s
        if self._ripe():
            return self._at_s + self._duration(self._steps_until(now_s)) if self._running else now_s
        if not self._running:
            return math.inf
        return max(now_s, self._at_s + self._duration(self._running[0][0] - self.steps))

    def run(self, now_s: float) -> list[Job]:
        """Whatever is due by now; returns the samples that ended."""
        if now_s < self._at_s - 1e-9:
            return []
        done: list[Job] = []
        if self._running:
            steps = min(self._steps_by(now_s), self._running[0][0] - self.steps)
            self._decode(steps)
            while self._running and self._running[0][0] <= self.steps:
                job = heapq.heappop(self._running)[2]
                self._context -= job.prompt + job.length
                job.segments = self._segments(job)
                done.append(job)
        if self._ripe() and (not self._running or self._at_s >= now_s - 1e-9):
            self._at_s = max(self._at_s, now_s)
            self._load()
            self._admit()
            if self._coming is None:
                self._coming, self._later = self._later, None
        elif not self._running:
            self._at_s = max(self._at_s, now_s)
        return done

    def _ripe(self) -> bool:
        """Whether something waits for the end of a step."""
        if self._coming is not None and (self.on_update != "drain" or not self._running):
            return True
        return self._may_admit()

    def _may_admit(self) -> bool:
        if self.on_update == "drain" and self._coming is not None:
            return False
        return bool(self.waiting) and len(self._running) < self.speeds.slots and self._ready(self.waiting[0])

    def _ready(self, job: Job) -> bool:
        return job.min_version <= (self.version if self._coming is None else self._coming)

    def _load(self) -> None:
        if self._coming is None or (self.on_update == "drain" and self._running):
            return
        pause_s = self.speeds.load_s if self.version >= 0 else 0.0
        if self.on_update == "recompute":
            pause_s += self._context * self.speeds.prefill_token_s
        self.version, self._coming = self._coming, None
        self._since.append((self.version, self.steps))
        self.update_s += pause_s
        self._at_s += pause_s

    def _admit(self) -> None:
        while self._may_admit():
            job = self.waiting.popleft()
            pause_s = job.prompt * self.speeds.prefill_token_s
            self.prefill_s += pause_s
            self._at_s += pause_s
            self._context += job.prompt
            job._joined = self.steps
            self._pushed += 1
            heapq.heappush(self._running, (self.steps + job.length, self._pushed, job))

    def _decode(self, steps: int) -> None:
        if steps <= 0:
            return
        took_s = self._duration(steps)
        self.decode_s += took_s
        self._at_s += took_s
        self._context += len(self._running) * steps
        self.steps += steps
        self.row_steps += len(self._running) * steps

    def _duration(self, steps: int) -> float:
        first, more = self._step_s()
        return steps * first + more * steps * (steps - 1) / 2

    def _step_s(self) -> tuple[float, float]:
        """Seconds of the next step, and by how much each one takes longer than the one before."""
        rows, speeds = len(self._running), self.speeds
        first = speeds.decode_base_s + rows * speeds.decode_row_s + self._context * speeds.decode_context_s
        return first, rows * speeds.decode_context_s

    def _exact_steps(self, now_s: float) -> float:
        first, more = self._step_s()
        left_s = max(0.0, now_s - self._at_s)
        linear = first - more / 2
        if more * left_s < 1e-12 * first * first:
            return left_s / first
        return (math.sqrt(linear * linear + 2 * more * left_s) - linear) / more

    def _steps_until(self, now_s: float) -> int:
        """Steps to the first end of a step that is not before `now_s`."""
        return math.ceil(self._exact_steps(now_s) - 1e-6)

    def _steps_by(self, now_s: float) -> int:
        """Steps that have ended by `now_s`."""
        return math.floor(self._exact_steps(now_s) + 1e-6)

    def _segments(self, job: Job) -> Runs:
        out: list[tuple[int, int]] = []
        end = self.steps
        for version, first in reversed(self._since):
            begin = max(first, job._joined)
            if begin < end:
                out.append((version, end - begin))
                end = begin
            if first <= job._joined:
                break
        return tuple(reversed(out))
