"""The trainer on the bus: batches in, weight versions out.

`Batch` i was stored before it is trained, so it is a write-ahead record: after a crash the newest checkpoint is loaded
and the batches behind it are trained again, with bit-identical results (I7). What is published already is not published
twice, but compared.

A trainer has one rank or many. Each reads the batches and fetches its own share of their samples; rank 0 publishes,
saves and exports. Before each step the ranks agree that all of them have the batch: if one is to stop, all stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgpack
import numpy as np
import structlog

from actors import clock
from actors.gauges import Gauges
from actors.trainer.base_check import check_base
from actors.trainer.config import TrainerConfig
from actors.trainer.evaluations import Evaluations
from actors.trainer.metrics import Wait, of_ages, of_times
from actors.trainer.process import PURGED_REMEDY, check_process_rewards, verdicts_of
from actors.trainer.publisher import Publisher, WriterPort
from actors.trainer.ranks import OneRank, Ranks, share_of
from actors.trainer.retention import NOTHING_JUDGED, Judged
from actors.trainer.samples import TrainSample, train_sample
from bus.port import Bus, Entry
from bus.table import BATCHES, ROLLOUTS, WEIGHTS
from bus.weights.writer import Snapshot
from schemas import Batch, Rollout, Segments, StepDone, UserError, WeightVersion
from schemas.trajectory import model_tokens

log = structlog.get_logger()


class CheckpointsPort(Protocol):
    """Where checkpoints lie; `actors.trainer.checkpoint.Checkpoints` is it."""

    def save(self, step: int, state: Mapping[str, Any], judged: Judged) -> None:
        """Write the checkpoint of `step`, whole or not at all, and remove old ones, but not the best of `judged`."""

    def load_newest(self) -> tuple[int, dict[str, Any]] | None:
        """Step and state of the newest checkpoint that is whole; None if there is none."""

    def steps(self) -> set[int]:
        """Of the checkpoints that are kept."""


class LearnerPort(Protocol):
    """What the actor needs of a learner; `actors.trainer.learner.Learner` is it."""

    def step(self, step: int, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Train on the samples of a step; returns its metrics."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A batch with this rank's share of its samples, as one step takes them."""

    batch: Batch
    samples: tuple[TrainSample, ...]
    staleness: np.ndarray[Any, np.dtype[np.int64]]  # [k]: trained tokens i versions old
    masked_tokens: int  # tokens of the policy left out because they were too old
    response_tokens: int  # tokens of the policy
    seconds: float
    arrived_s: float  # when the batch came, by the monotonic clock
    formed_s: float  # when the batch was stored, and the last rollout of this rank's share, by the broker's clock
    last_rollout_s: float


class Trainer:
    """Trains batch after batch with `learner` and publishes what comes of it.

    `tensors()` are the weights to publish, `export()` writes the final model. With several `ranks` this is one of them:
    all of them call both, since weights may lie in shards, and rank 0 publishes and writes.
    """

    def __init__(
        self,
        bus: Bus,
        config: TrainerConfig,
        steps: int,
        learner: LearnerPort,
        tensors: Callable[[], Mapping[str, Any]],
        export: Callable[[], None],
        writer: WriterPort,
        checkpoints: CheckpointsPort,
        name: str = "trainer",
        ranks: Ranks | None = None,
        evaluations: Evaluations | None = None,
    ) -> None:
        self.bus = bus
        self.config = config
        self.steps = steps
        self.learner = learner
        self.tensors = tensors
        self.export = export
        self.writer = writer
        self.checkpoints = checkpoints
        self.ranks: Ranks = ranks or OneRank()
        self.evaluations = evaluations
        self.version = 0
        self._tokens_trained = 0
        self._saved_version = -1
        self._published = -1  # newest version in the log when we began
        self._publisher: Publisher | None = None  # of rank 0
        self._checkpoint_s = 0.0  # that the last checkpoint took, until a step tells it
        self.gauges = Gauges(bus, name, "trainer", self._read_gauges)

    async def run(self, stop: asyncio.Event) -> None:
        """Train until all steps are done or until `stop`, which lets the step in hand end and saves it."""
        async with self.gauges.beating():
            try:
                await self._restore()
                await self._train(stop)
                await self._save()
            finally:
                if self._publisher is not None:
                    await self._publisher.close()
            if self.version >= self.steps:
                await asyncio.to_thread(self.export)

    async def _train(self, stop: asyncio.Event) -> None:
        loader = asyncio.create_task(self._load_ahead(queue := asyncio.Queue[Loaded](1)), name="trainer loads")
        try:
            while self.version < self.steps:
                started, waited_before = clock.monotonic_s(), self.gauges.idle_s
                loaded = None if stop.is_set() else await self._next(queue, loader, stop)
                got = clock.monotonic_s()
                if not await self._all_go_on(loaded is not None) or loaded is None:
                    break
                wait = Wait(started, loaded.arrived_s, got)
                await self._step(loaded, wait, self.gauges.idle_s - waited_before)
        finally:
            loader.cancel()
            await asyncio.gather(loader, return_exceptions=True)

    async def _restore(self) -> None:
        newest = await asyncio.to_thread(self.checkpoints.load_newest)
        await self._check_one_start(newest)
        if self.config.lora is not None:
            base = await asyncio.to_thread(self.tensors)  # version 0, as long as nothing is restored
            if self._leads:
                await check_base(self.bus, base)
        if newest is not None:
            self.version, state = newest
            self.learner.load_state_dict(state["learner"])
            self._tokens_trained = state["tokens_trained"]
            self._saved_version = self.version
        self._published = (await self._gather(await self._published_version()))[0]
        log.info("trainer_restored", version=self.version, published_version=self._published)
        if self._leads:
            self._publisher = Publisher(self.bus, self.config, self.writer, self._published, self.checkpoints.steps)
        snapshot = await self._take_weights()
        if self._publisher is not None:
            await self._publisher.announce(snapshot)

    @property
    def _leads(self) -> bool:
        """Whether this rank speaks for all."""
        return self.ranks.rank == 0

    async def _gather(self, own: Any) -> list[Any]:
        """What all ranks tell, by rank. A thread waits for them, so that this one keeps beating."""
        if self.ranks.count == 1:
            return [own]
        told = await asyncio.to_thread(self.ranks.gather, msgpack.packb(own))
        return [msgpack.unpackb(each) for each in told]

    async def _all_go_on(self, ready: bool) -> bool:
        with self.gauges.waiting("the other ranks") if self.ranks.count > 1 else contextlib.nullcontext():
            return all(await self._gather(ready))

    async def _check_one_start(self, newest: tuple[int, dict[str, Any]] | None) -> None:
        versions = await self._gather(0 if newest is None else newest[0])
        if len(set(versions)) > 1:
            raise UserError(
                f"The ranks of the trainer find different checkpoints: of versions {versions}, by rank.",
                "All of them must see the run's folder at the same path; mount it on every machine.",
            )

    async def _published_version(self) -> int:
        newest = await self.bus.last(WEIGHTS)
        if newest is None:
            return -1
        message = newest.message()
        assert isinstance(message, WeightVersion)
        return message.version

    async def _load_ahead(self, queue: asyncio.Queue[Loaded]) -> None:
        """Keep the next batch at hand, while this one is trained."""
        async for entry in self.bus.read(BATCHES, self.version + 1):  # batch i stands at sequence i + 1
            await queue.put(await self._load(entry))

    async def _next(
        self, queue: asyncio.Queue[Loaded], loader: asyncio.Task[None], stop: asyncio.Event
    ) -> Loaded | None:
        if not queue.empty():
            return queue.get_nowait()
        get, stopping = asyncio.create_task(queue.get()), asyncio.create_task(stop.wait())
        waits: list[asyncio.Task[Any]] = [get, stopping]
        if self._publisher is not None:
            waits.append(asyncio.create_task(self._publisher.failed.wait()))
        try:
            with self.gauges.waiting("a batch"):
                await asyncio.wait([*waits, loader], return_when=asyncio.FIRST_COMPLETED)
            if loader.done():
                loader.result()
            if self._publisher is not None and self._publisher.failed.is_set():
                await self._publisher.settled()
            return get.result() if get.done() else None
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _load(self, entry: Entry) -> Loaded:
        """The samples of a batch. Raises `UserError` if the log does not hold what the batch names."""
        started = clock.monotonic_s()
        batch = entry.message()
        assert isinstance(batch, Batch)
        share = share_of(batch, self.ranks)
        check_process_rewards(batch, self.config)
        try:
            entries = await self.bus.get(ROLLOUTS, batch.rollout_seqs[share].tolist())
        except LookupError as error:
            raise UserError(
                f"Batch {batch.step} names a rollout that the log no longer holds: {error}.",
                PURGED_REMEDY,
            ) from error
        samples: list[TrainSample] = []
        ages: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        masked = response_tokens = 0
        for stored, scored, group_id, index, reward in zip(
            entries,
            await verdicts_of(self.bus, batch, share),
            batch.group_ids[share].tolist(),
            batch.indices[share].tolist(),
            batch.rewards[share].tolist(),
            strict=True,
        ):
            rollout = stored.message()
            if not isinstance(rollout, Rollout) or (rollout.group_id, rollout.index) != (group_id, index):
                raise UserError(f"Batch {batch.step} names entry {stored.seq} as sample {group_id}-{index}; it is not.")
            age = ages_of(rollout.segments, batch.step)
            fresh = age <= batch.max_staleness
            made = model_tokens(rollout.observations, len(age))
            response_tokens += int(made.sum())
            masked += int((made & ~fresh).sum())
            ages.append(age[made & fresh])
            if len(age):
                samples.append(train_sample(rollout, fresh, batch.step - age, reward, scored))
        staleness = np.bincount(np.concatenate(ages) if ages else np.zeros(0, np.int64)).astype(np.int64)
        return Loaded(
            batch,
            tuple(samples),
            staleness,
            masked,
            response_tokens,
            clock.monotonic_s() - started,
            arrived_s=started,
            formed_s=entry.time_s,
            last_rollout_s=max((stored.time_s for stored in entries), default=0.0),
        )

    async def _step(self, loaded: Loaded, wait: Wait, waited_s: float) -> None:
        batch = loaded.batch
        if batch.step != self.version:
            raise UserError(f"The log holds batch {batch.step} where batch {self.version} is expected.")
        train_started, cpu_before = clock.monotonic_s(), clock.cpu_s()
        metrics = await asyncio.to_thread(self.learner.step, batch.step, loaded.samples)
        trained = clock.monotonic_s()
        staleness, masked_tokens, response_tokens, last_rollout_s = await self._of_all_ranks(loaded)
        self.version += 1
        self._tokens_trained += int(staleness.sum())
        snapshot = await self._take_weights()
        published = clock.monotonic_s()
        causes = wait.by_cause(last_rollout_s, batch.last_scored_s, loaded.formed_s)
        seconds = {
            "seconds": published - wait.began,
            "seconds_waiting": waited_s,
            **{f"seconds_waiting_{cause}": waited for cause, waited in causes.items()},
            "seconds_waiting_ranks": max(0.0, waited_s - sum(causes.values())) if self.ranks.count > 1 else 0.0,
            "seconds_loading": loaded.seconds,
            "seconds_training": trained - train_started,
            "seconds_publishing": published - trained,
            "seconds_checkpoint": self._checkpoint_s,
        }
        self._checkpoint_s = 0.0
        metrics |= {
            **{f"seen/{name}": value for name, value in batch.seen.items()},
            "reward": batch.seen.get("reward", metrics.get("reward_mean", 0.0)),
            **of_ages(staleness),
            "stale_masked_tokens": float(masked_tokens),
            "response_tokens": float(response_tokens),
            **seconds,
            **of_times(seconds, float(staleness.sum())),
            "cpu_seconds": clock.cpu_s() - cpu_before,
            "time": clock.wall_s(),
        }
        if self._publisher is not None:
            done = StepDone(step=batch.step, version=self.version, metrics=metrics, staleness=staleness)
            await self._publisher.announce(snapshot, done)
        log.info("step_trained", step=batch.step, reward=round(metrics["reward"], 4), version=self.version)
        if self.version % self.config.checkpoint_every == 0:
            await self._save()

    async def _of_all_ranks(self, loaded: Loaded) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int, int, float]:
        """Staleness, masked tokens and response tokens of the whole batch, and when its last rollout was stored."""
        own = [loaded.staleness.tolist(), loaded.masked_tokens, loaded.response_tokens, loaded.last_rollout_s]
        counts, masked, tokens, stored_s = zip(*await self._gather(own), strict=True)
        staleness = np.zeros(max(map(len, counts)), np.int64)
        for of_rank in counts:
            staleness[: len(of_rank)] += of_rank
        return staleness, sum(masked), sum(tokens), max(stored_s)

    async def _take_weights(self) -> Snapshot | None:
        """What is to be published of this version. All ranks ask, since the weights may lie in shards."""
        if self._publisher is not None:
            return await self._publisher.take(self.version, self.tensors)
        if self.version >= self._published:
            await asyncio.to_thread(self.tensors)
        return None

    async def _save(self) -> None:
        if self._publisher is not None:
            await self._publisher.settled()  # or a crash would leave the log without the step that is saved
        if self._saved_version == self.version:
            return
        began, of_learner = clock.monotonic_s(), self.learner.state_dict
        state = {
            "learner": of_learner() if self.ranks.count == 1 else await asyncio.to_thread(of_learner),
            "tokens_trained": self._tokens_trained,
        }
        self._saved_version = self.version
        if not self._leads:
            return
        judged = NOTHING_JUDGED
        if self.evaluations is not None:
            judged = await self.evaluations.judged(self.checkpoints.steps() | {self.version})
        await asyncio.to_thread(self.checkpoints.save, self.version, state, judged)
        self._checkpoint_s = clock.monotonic_s() - began
        log.info("checkpoint_saved", version=self.version)

    def _read_gauges(self) -> dict[str, Any]:
        return {"step": self.version, "version": self.version, "tokens_trained": self._tokens_trained}


def ages_of(segments: Segments, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Staleness int64[T] of each token at step `step`: `step - version(token)`."""
    if not segments:
        return np.zeros(0, np.int64)
    versions, counts = np.array(segments, np.int64).T
    return np.repeat(step - versions, counts)
