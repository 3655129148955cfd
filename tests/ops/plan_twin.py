"""The twin of `ops.plan.cluster`: the production actors on the log in memory, in virtual time, with the same models.

It has what the cluster model leaves out: shells, fetches, acknowledgements, heartbeats, reading the log.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar

from actors import clock
from actors.controller.actor import Controller
from actors.reward.actor import RewardWorker
from actors.reward.config import RewardConfig
from actors.reward.verdict import RewardRequest, Verdict
from actors.rollout.actor import RolloutWorker
from actors.rollout.config import RolloutConfig
from actors.rollout.engine import EngineStats, Generation, Request
from actors.trainer.actor import Trainer
from actors.trainer.config import PublishConfig, TrainerConfig
from actors.trainer.samples import TrainSample
from bus.memory import MemoryBus, MemoryHub
from bus.table import STEPS
from bus.weights import Local, Snapshot
from ops.plan.cluster import Workload
from ops.plan.engine import Job, ModelEngine
from ops.plan.speeds import Speeds
from ops.sim.loop import VirtualLoop, run_virtual
from schemas import StepDone, WeightVersion, parse_sample_id

T = TypeVar("T")
CHILDREN = 64
VIRTUAL_S_MAX = 10_000.0
DIGEST = f"sha256-{'0' * 64}"


class TwinLoop(VirtualLoop):
    """A call in a thread takes the seconds that it says it owes."""

    def __init__(self) -> None:
        super().__init__()
        self.owed_s = 0.0

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        result = func(*args)
        took_s, self.owed_s = self.owed_s, 0.0
        self.call_later(took_s, lambda: future.done() or future.set_result(result))
        return future


class LoopClock:
    """The loop's time is everybody's."""

    def __init__(self, loop: TwinLoop) -> None:
        self._loop = loop

    def monotonic_s(self) -> float:
        return self._loop.time()

    def wall_s(self) -> float:
        return self._loop.time()

    def cpu_s(self) -> float:
        return 0.0

    def process(self) -> str:
        return "twin:1"


class TwinEngine:
    """`actors.rollout.engine.Engine` over a `ModelEngine`."""

    def __init__(self, speeds: Speeds, workload: Workload, seed: int, loop: TwinLoop) -> None:
        self.model = ModelEngine(speeds, workload.on_update)
        self.slots = speeds.slots
        self._workload, self._seed, self._loop = workload, seed, loop
        self._futures: dict[tuple[int, int], asyncio.Future[Job]] = {}
        self._updates: list[tuple[int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def version(self) -> int:
        return self.model.version

    async def start(self) -> None:
        pass

    async def generate(self, request: Request) -> Generation:
        sample = parse_sample_id(request.sample_id)
        assert sample is not None
        length = self._workload.group(self._seed, sample[0])[0][sample[1]]
        self._futures[sample] = self._loop.create_future()
        self.model.give(Job(*sample, len(request.prompt_tokens), length))
        self._schedule()
        job = await self._futures[sample]
        del self._futures[sample]
        zeros = (0,) * length
        return Generation(request.sample_id, request.prompt_tokens, zeros, zeros, job.segments, "stop")

    async def update(self, version: int, path: str | Path, base: str | Path | None = None) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._updates.append((version, done))
        self.model.update(version)
        self._schedule()
        await done

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.model.next_s(self._loop.time())
        self._timer = self._loop.call_at(due_s, self._run) if due_s < float("inf") else None

    def _run(self) -> None:
        for job in self.model.run(self._loop.time()):
            self._futures[job.group_id, job.index].set_result(job)
        for version, done in self._updates:
            if version <= self.model.version and not done.done():
                done.set_result(None)
        self._schedule()

    def lengths(self) -> dict[str, int]:
        return {}

    def tokens(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {}

    def snapshot(self, sample_id: str) -> Generation | None:
        return None

    async def failed(self) -> None:
        await asyncio.Event().wait()

    async def hand_over(self) -> None:
        for future in self._futures.values():
            future.cancel()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def stats(self) -> EngineStats:
        return EngineStats(self.model.running, len(self.model.waiting), 0, 0, 0.0, 0.0)


@dataclasses.dataclass
class TwinRest:
    """Tokenizer, reward pool, learner and checkpoints in one."""

    speeds: Speeds
    workload: Workload
    seed: int
    train_devices: int
    loop: TwinLoop
    digest: str = ""

    def encode_prompt(self, prompt: Any) -> tuple[int, ...]:
        return (0,) * self.workload.lengths.prompt

    def decode(self, tokens: Sequence[int]) -> str:
        return ""

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def reload(self) -> str:
        return self.digest

    async def score(self, request: RewardRequest) -> Verdict:
        if self.speeds.reward_s:
            await asyncio.sleep(self.speeds.reward_s)
        sample = parse_sample_id(request.sample_id)
        assert sample is not None
        equal = self.workload.group(self.seed, sample[0])[1]
        return Verdict("scored", 1.0 if equal else float(sample[1] % 2))

    def step(self, step: int, samples: Sequence[TrainSample]) -> dict[str, float]:
        tokens = sum(len(sample.prompt_tokens) + len(sample.tokens) for sample in samples)
        self.loop.owed_s = self.speeds.train_s(tokens, self.train_devices)
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def save(self, step: int, state: Mapping[str, Any], judged: object = None) -> None:
        pass

    def load_newest(self) -> tuple[int, dict[str, Any]] | None:
        return None

    def steps(self) -> set[int]:
        return set()


@dataclasses.dataclass
class TwinWeights:
    """Writer and reader of weights that are nothing but their version."""

    speeds: Speeds
    loop: TwinLoop

    def snapshot(self, version: int, weights: Mapping[str, Any]) -> Snapshot:
        return Snapshot(version, b"")

    def publish(self, snapshot: Snapshot, before: Snapshot | None = None) -> WeightVersion:
        self.loop.owed_s = self.speeds.publish_s if snapshot.version else 0.0
        return WeightVersion(version=snapshot.version, path=f"v{snapshot.version}", digest=DIGEST, nbytes=1)

    def collect(self, keep_from_version: int, keep: set[int]) -> list[int]:
        return []

    async def fetch(self, event: WeightVersion) -> Local:
        return Local(Path(event.path))

    def close(self) -> None:
        pass


def run_twin(
    speeds: Speeds,
    workload: Workload,
    engines: int,
    train_devices: int,
    steps: int,
    seed: int = 0,
    hub: MemoryHub | None = None,
) -> list[tuple[float, Counter[int], int]]:
    """(virtual time at which it ended, trained tokens by age, masked tokens) of the first `steps` steps.

    Its log, run `twin`, stays in `hub`.
    """
    hub = hub or MemoryHub()
    loop = TwinLoop()
    rest = TwinRest(speeds, workload, seed, train_devices, loop)
    planned = steps + workload.controller.max_staleness + 2

    def run() -> list[tuple[float, Counter[int], int]]:
        clock.use(LoopClock(loop))
        return run_virtual(_run(speeds, workload, engines, steps, planned, seed, rest, loop, hub), loop)[0]

    return copy_context().run(run)


async def _run(
    speeds: Speeds,
    workload: Workload,
    engines: int,
    steps: int,
    planned: int,
    seed: int,
    rest: TwinRest,
    loop: TwinLoop,
    hub: MemoryHub,
) -> list[tuple[float, Counter[int], int]]:
    def bus() -> MemoryBus:
        return MemoryBus("twin", hub)

    await bus().setup()
    stop = asyncio.Event()
    rollout = RolloutConfig(slots=speeds.slots, on_update=workload.on_update)
    weights = TwinWeights(speeds, loop)
    actors: list[Any] = [
        RolloutWorker(bus(), rollout, TwinEngine(speeds, workload, seed, loop), rest, (), weights, f"rollout-{number}")
        for number in range(engines)
    ]
    actors.append(RewardWorker(bus(), RewardConfig(children=CHILDREN), rest, "reward-0"))
    actors.append(Controller(bus(), workload.controller, planned, seed, lambda group_id: {"prompt": "p"}))
    trainer = TrainerConfig(publish=PublishConfig(overlap=False))  # as the cluster model has it
    actors.append(Trainer(bus(), trainer, planned, rest, dict, lambda: None, weights, rest))
    tasks = [asyncio.create_task(actor.run(stop)) for actor in actors]
    out = []
    async with asyncio.timeout(VIRTUAL_S_MAX):
        async for entry in bus().read(STEPS):
            message = entry.message()
            assert isinstance(message, StepDone)
            ages = Counter({age: int(count) for age, count in enumerate(message.staleness) if count})
            out.append((entry.time_s, ages, int(message.metrics["stale_masked_tokens"])))
            if len(out) == steps:
                break
    stop.set()  # in Python 3.11 `wait_for` may swallow a cancellation
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return out
