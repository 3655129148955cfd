"""A log in lists that keeps every promise, for tests that break it, and a `LogSource` on such lists."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bus.jetstream import JetStreamBus
from bus.port import Entry, StreamInfo, headers_of, key_of
from bus.table import STREAM_OF, Stream
from ops.findings import Report, Rules
from ops.invariants import READ_ORDER, Auditor
from ops.nats_server import NatsServer
from ops.recording.cut import Cut, cut_of
from schemas import (
    Batch,
    Control,
    Dropped,
    Evaluation,
    Message,
    Partial,
    Prompt,
    Rollout,
    Scored,
    StepDone,
    WeightVersion,
    encode,
)

ETA, B, SIZE, STEPS_PLANNED = 1, 2, 2, 3
RUN = "audited"


class Log:
    """A log in lists. Each record is stored a second after the one before it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.entries: dict[str, list[Entry]] = {stream.name: [] for stream in READ_ORDER}

    def put(self, message: Message, **changes: Any) -> Entry:
        """Store a message at the end of its stream; `changes` are those of the entry."""
        stream = STREAM_OF[type(message)]
        self.now_s += 1.0
        seq = len(self.entries[stream.name]) + 1
        entry = Entry(stream, seq, key_of(message), headers_of(RUN, message), encode(message), self.now_s)
        self.entries[stream.name].append(dataclasses.replace(entry, **changes))
        return entry

    def replace(self, stream: Stream, seq: int, **changes: Any) -> None:
        """Another message, with `changes` to its fields, in the place of the one at `seq`."""
        old = self.entries[stream.name][seq - 1]
        message = dataclasses.replace(old.message(), **changes)
        new = dataclasses.replace(old, headers=headers_of(RUN, message), data=encode(message))
        self.entries[stream.name][seq - 1] = new

    def remove(self, stream: Stream, seq: int) -> None:
        """Take an entry out."""
        self.entries[stream.name] = [entry for entry in self.entries[stream.name] if entry.seq != seq]

    def audit(self, digest: str | None = None, planned: tuple[int, ...] = (STEPS_PLANNED,)) -> Report:
        plans = iter(planned)  # what each start asks for; the last serves for all after it
        auditor = Auditor(lambda _, time_s: Rules(time_s, ETA, B, next(plans, planned[-1])), lambda _: digest)
        for stream in READ_ORDER:
            for entry in self.entries[stream.name]:
                auditor.feed(entry)
        return auditor.report()


def rollout(group: int, index: int, segments: list[tuple[int, int]], **changes: Any) -> Rollout:
    tokens = sum(count for _, count in segments)
    fields: dict[str, Any] = {
        "group_id": group,
        "index": index,
        "group_size": SIZE,
        "prompt": "2+3=",
        "task": {},
        "prompt_tokens": [1],
        "tokens": np.arange(tokens),
        "logprobs": np.full(tokens, -0.5),
        "segments": segments,
        "finish": "stop",
        "text": "5",
        "seconds": 0.5,
    }
    return Rollout(**fields | changes)


def prompts(group: int, version: int) -> list[Prompt]:
    return [
        Prompt(group_id=group, index=i, group_size=SIZE, prompt="2+3=", task={}, seed=i, min_version=version)
        for i in range(SIZE)
    ]


def weights(version: int) -> WeightVersion:
    return WeightVersion(version=version, path=f"v{version}", digest=f"sha256-{version}", nbytes=1)


def evaluation(version: int, reward: float = 0.5) -> Evaluation:
    return Evaluation(version=version, data="held-out", reward=reward, count=2, verdicts={"scored": 2})


def verdict(sample: Rollout, seq: int) -> Scored:
    return Scored(
        group_id=sample.group_id,
        index=sample.index,
        group_size=SIZE,
        rollout_seq=seq,
        prompt_length=1,
        segments=sample.segments,
        finish="stop",
        verdict="scored",
        reward=float(sample.index),
    )


def whole_run(steps: int = STEPS_PLANNED) -> Log:
    """A sound run: admission at its bound, tokens of two versions, one group dropped, one handed over, an end.

    Groups 0 to 3 are admitted at version 0. Group 1 is dropped and made good by group 4; then two come a version.
    """
    log = Log()
    log.put(Control(action="start", nonce="a"))
    log.put(weights(0))
    admitted = 0
    admitted_at: dict[int, int] = {}

    def admit(up_to: int, version: int) -> None:
        nonlocal admitted
        for group in range(admitted, up_to):
            admitted_at[group] = version
            for prompt in prompts(group, version):
                log.put(prompt)
        admitted = max(admitted, up_to)

    admit((ETA + 1) * B, 0)
    log.put(Partial(group_id=0, index=1, tokens=[0, 1], logprobs=[-0.5, -0.5], segments=[(0, 2)], worker="gone"))
    for index in range(SIZE):
        log.put(Dropped(group_id=1, index=index, reason="zero_variance", tokens=3))
    admit((ETA + 1) * B + 1, 0)
    live = [group for group in range(100) if group != 1]
    for step in range(steps):
        groups, live = live[:B], live[B:]
        seqs = []
        for group in groups:
            for index in range(SIZE):
                first = admitted_at[group]
                segments = [(first, 3), (step, 2)] if step > first else [(first, 5)]
                sample = rollout(group, index, segments)
                seqs.append(log.put(sample).seq)
                log.put(verdict(sample, seqs[-1]))
        log.put(
            Batch(
                step=step,
                max_staleness=ETA,
                group_ids=np.repeat(groups, SIZE),
                indices=[0, 1] * B,
                rollout_seqs=seqs,
                rewards=[0.0, 1.0] * B,
                next_group=admitted,
                live_groups=[group for group in live if group < admitted],
            )
        )
        ages = np.zeros(ETA + 1, np.int64)
        for group in groups:
            old, new = (3, 2) if step > admitted_at[group] else (0, 5)
            ages[0] += SIZE * new
            if step - admitted_at[group] <= ETA:
                ages[step - admitted_at[group]] += SIZE * old
        log.put(weights(step + 1))
        log.put(StepDone(step=step, version=step + 1, metrics={}, staleness=ages))
        admit(min(ETA + step + 2, STEPS_PLANNED) * B + 1, step + 1)
    log.put(evaluation(0))
    log.put(evaluation(steps))
    if steps == STEPS_PLANNED:
        log.put(Control(action="stop", nonce=f"end-{steps}"))
    return log


class LogInLists:
    """An `ops.log_source.LogSource` over a `Log`."""

    damage: tuple[str, ...] = ()

    def __init__(self, log: Log, recipe_yaml: str = "name: audited\n") -> None:
        self.run = RUN
        self.recipe_yaml = recipe_yaml
        self._log = log

    async def cut(self) -> Cut:
        return await cut_of(self)

    async def info(self, stream: Stream) -> StreamInfo:
        entries = self._log.entries[stream.name]
        if not entries:
            return StreamInfo(1, 0, 0, 0)
        return StreamInfo(entries[0].seq, entries[-1].seq, len(entries), sum(len(entry.data) for entry in entries))

    async def read(self, stream: Stream, start: int = 1, stop: int | None = None) -> AsyncGenerator[Entry, None]:
        for entry in self._log.entries[stream.name]:
            if start <= entry.seq and (stop is None or entry.seq < stop):
                yield entry

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        by_seq = {entry.seq: entry for entry in self._log.entries[stream.name]}
        return [by_seq[seq] for seq in seqs]


async def stored_run(folder: Path, server: NatsServer) -> JetStreamBus:
    """Start `server` on a run's folder and store a whole run in it; returns a connected bus."""
    url = await server.start(folder)
    (folder / "run.json").write_text(json.dumps({"run": RUN, "url": url, "pid": 1}))
    bus = JetStreamBus(RUN, url)
    await bus.connect()
    await bus.setup()
    for entries in whole_run().entries.values():
        for entry in entries:
            await bus.publish(entry.message())
    return bus
