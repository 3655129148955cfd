"""What is heavy in a real run, made light and exact: engine, reward pool, learner, weights' bytes, checkpoints.

Each result is a pure function that a checker can compute again. A token tells which weights made it: it and its logprob
are digests of sample seed, position and the loaded bytes. Weights tell what they were trained on: the learner's state
is a hash chain over all that its steps were given. So a wrong tag, a wrong batch, a step done twice become visible.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import hashlib
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.reward.verdict import RewardRequest, Status, Verdict
from actors.rollout.engine import (
    ContextTooLongError,
    EngineClosedError,
    EngineStats,
    Finish,
    Generation,
    Request,
    WeightsError,
)
from actors.trainer.retention import NOTHING_JUDGED, Judged, Retention
from actors.trainer.samples import TrainSample
from bus.weights.files import digest_of
from ops.sim.world import Killed, Process

FIRST_STATE = "initial"
CONTEXT_MAX = 120  # tokens that the model goes on from, at most
_FAILURES: tuple[Status, ...] = ("timeout", "error", "invalid")


# ---- what is computed


def asked_of(seed: int, context: Sequence[int] = ()) -> str:
    """What the tokens of an answer follow from, beside the weights: a seed, and in episodes the tokens before them."""
    digest = hashlib.blake2b(np.array(context, "<i4").tobytes(), digest_size=8).hexdigest()
    return f"{seed}/{digest}" if len(context) else f"{seed}"


def token_of(asked: str, position: int, digest: str) -> tuple[int, float]:
    """Token id (1 to 65,535) and logprob (a float32) that the weights of this digest give at a position."""
    drawn = hashlib.blake2b(f"{asked}/{position}/{digest}".encode(), digest_size=8).digest()
    token, fraction = struct.unpack("<HxxI", drawn)
    return token or 1, -float(np.float32(fraction / 2**32))


def length_of(seed: int, mean_tokens: int) -> int:
    """Tokens until a sample stops by itself: long-tailed, the same under all weights."""
    drawn = hashlib.blake2b(f"{seed}/length".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(drawn, "little") + 1) / 2**64
    return max(1, int(mean_tokens * 0.5 * uniform ** (-1 / 1.5)))


def row_of(group_id: int, equal_share: float) -> dict[str, Any]:
    """The data row of a group; in `equal_share` of them all answers are worth the same."""
    drawn = hashlib.blake2b(f"row/{group_id}".encode(), digest_size=8).digest()
    return {"prompt": f"prompt {group_id}", "equal": int.from_bytes(drawn, "little") / 2**64 < equal_share}


def prompt_tokens_of(prompt: Any) -> tuple[int, ...]:
    """The tokens of a prompt."""
    return tuple(str(prompt).encode())


def reward_of(task: Mapping[str, Any], tokens: Sequence[int]) -> float:
    """The reward of an answer."""
    return 0.1 + 0.2 if task["equal"] else sum(tokens) % 4 / 3


def next_state(state: str, step: int, samples: Sequence[TrainSample]) -> str:
    """The learner's state after a step: a digest of all that it was given."""
    chain = hashlib.blake2b(f"{state}/{step}".encode(), digest_size=16)
    for sample in samples:
        chain.update(f"/{sample.sample_id}/{sample.group_id}/{sample.reward!r}/".encode())
        for array in (sample.prompt_tokens, sample.tokens, sample.behaviour_logprobs, sample.loss_mask):
            chain.update(np.ascontiguousarray(array).tobytes())
        if sample.sequences is not None:
            chain.update(sample.sequences.tobytes())
    return chain.hexdigest()


def bytes_of(version: int, state: str) -> str:
    """The contents of a weight file."""
    return f"{version}/{state}"


# ---- the disk


@dataclasses.dataclass(slots=True)
class Saved:
    """A checkpoint; not `whole` if its writer died in the midst."""

    state: dict[str, Any]
    whole: bool


@dataclasses.dataclass(slots=True)
class Disk:
    """What outlives processes: weight files by name, checkpoints by step, exported models."""

    weights: dict[str, str] = dataclasses.field(default_factory=dict)
    checkpoints: dict[int, Saved] = dataclasses.field(default_factory=dict)
    exported: list[str] = dataclasses.field(default_factory=list)
    steps_trained: set[int] = dataclasses.field(default_factory=set)


def check_room(process: Process) -> None:
    """Raises `OSError` while the disk is full."""
    if process.world.fate(process, "disk_full"):
        raise OSError(errno.ENOSPC, "No space left on device")


class MemoryCheckpoints:
    """`actors.trainer.checkpoint.Checkpoints` on the simulated disk, with the same choice of what is removed."""

    def __init__(self, process: Process, disk: Disk, keep: int) -> None:
        self._process = process
        self._disk = disk
        self._keep = keep

    def save(self, step: int, state: Mapping[str, Any], judged: Judged = NOTHING_JUDGED) -> None:
        """See `Checkpoints.save`."""
        check_room(self._process)
        world, saved = self._process.world, self._disk.checkpoints
        torn = world.fate(self._process, "torn_save")
        if torn:
            if step not in saved and self._process.dice("torn").random() < 0.5:
                saved[step] = Saved(dict(state), whole=False)
                world.note(f"checkpoint {step} is torn")
            world.kill(self._process)
            raise Killed
        saved[step] = Saved(dict(state), whole=True)
        world.note(f"saved checkpoint {step}")
        damaged = {other for other in saved if other > step and not saved[other].whole}
        for other in saved.keys() - Retention(self._keep).kept(saved.keys() - damaged, judged) - {step}:
            del saved[other]

    def load_newest(self) -> tuple[int, dict[str, Any]] | None:
        """See `Checkpoints.load_newest`."""
        world = self._process.world
        for step in sorted(self._disk.checkpoints, reverse=True):
            if self._disk.checkpoints[step].whole:
                world.note(f"loaded checkpoint {step}")
                world.count("a checkpoint was loaded")
                return step, dict(self._disk.checkpoints[step].state)
            world.count("a torn checkpoint was passed over")
        return None

    def steps(self) -> set[int]:
        """See `Checkpoints.steps`."""
        return set(self._disk.checkpoints)


# ---- the heavy parts


class FakeLearner:
    """`actors.trainer.learner.Learner` whose weights are the digest of what it was trained on."""

    def __init__(self, process: Process, disk: Disk) -> None:
        self._process = process
        self._disk = disk
        self.state = FIRST_STATE

    def step(self, step: int, samples: Sequence[TrainSample]) -> dict[str, float]:
        """See `LearnerPort.step`."""
        self.state = next_state(self.state, step, samples)
        if step in self._disk.steps_trained:
            self._process.world.count("a batch was trained again")
        self._disk.steps_trained.add(step)
        self._process.world.note(f"trained step {step} -> {self.state[:8]}")
        rewards = [sample.reward for sample in samples]
        return {"reward_mean": sum(rewards) / max(1, len(rewards))}

    def state_dict(self) -> dict[str, Any]:
        """See `LearnerPort.state_dict`."""
        return {"state": self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LearnerPort.load_state_dict`."""
        self.state = state["state"]

    def tensors(self) -> dict[str, Any]:
        """What is published."""
        return {"state": self.state}

    def export(self) -> None:
        """Leave the final model on the disk."""
        self._disk.exported.append(self.state)


class FakePool:
    """`actors.reward.pool.RewardPool` that takes its time, and fails as the scenario says."""

    digest = ""

    def __init__(self, process: Process, children: int) -> None:
        self._process = process
        self._slots = asyncio.Semaphore(children)

    async def start(self) -> None:
        """See `RewardPool.start`."""

    async def reload(self) -> str:
        """See `RewardPool.reload`."""
        return self.digest

    async def score(self, request: RewardRequest) -> Verdict:
        """See `RewardPool.score`."""
        world = self._process.world
        async with self._slots:
            dice = self._process.dice("reward")
            seconds = dice.expovariate(1 / world.scenario.reward_s)
            await asyncio.sleep(seconds)
            if world.fate(self._process, "reward_fails"):
                status = dice.choice(_FAILURES)
                world.count(f"a verdict: {status}")
                return Verdict(status, detail="the simulation says so", seconds=seconds)
            assert request.tokens is not None
            return Verdict("scored", reward_of(request.task, request.tokens), seconds=seconds)

    async def close(self) -> None:
        """See `RewardPool.close`."""


class FakeTokenizer:
    """Bytes for prompts and what an episode tells, one of four letters for each token of an answer."""

    def encode_prompt(self, prompt: Any) -> tuple[int, ...]:
        """See `actors.rollout.actor.Tokenizer`."""
        return prompt_tokens_of(prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `actors.rollout.actor.Tokenizer`."""
        return "".join("abcd"[token % 4] for token in tokens)

    def encode(self, text: str) -> tuple[int, ...]:
        """See `actors.episode.conversation.Tokenizer`."""
        return tuple(text.encode())

    def quoted(self, text: str) -> str:
        """See `actors.episode.conversation.Tokenizer`: there are no special tokens here."""
        return text

    def render(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> str:
        """See `actors.episode.conversation.Tokenizer`: prompts are text here."""
        raise NotImplementedError

    def spelling(self, token: int) -> str:
        """See `actors.episode.conversation.Tokenizer`."""
        return self.decode([token])


class _Row:
    """A sequence in the batch, or waiting for a slot."""

    def __init__(self, request: Request, asked: str, length: int) -> None:
        known = request.unfinished()
        self.request = request
        self.asked = asked
        self.length = length  # at which it stops by itself
        self.tokens = list(known.tokens)
        self.logprobs = list(known.logprobs)
        self.segments = [list(pair) for pair in known.segments]
        self.future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

    @property
    def finish(self) -> Finish | None:
        if len(self.tokens) >= self.length:
            return "stop"
        return "length" if len(self.tokens) >= self.request.sampling.max_new_tokens else None

    def append(self, version: int, digest: str) -> None:
        token, logprob = token_of(self.asked, len(self.tokens), digest)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.segments and self.segments[-1][0] == version:
            self.segments[-1][1] += 1
        else:
            self.segments.append([version, 1])

    def generation(self, finish: Finish | None) -> Generation:
        segments = tuple((version, count) for version, count in self.segments)
        return Generation(
            self.request.sample_id,
            self.request.prompt_tokens,
            tuple(self.tokens),
            tuple(self.logprobs),
            segments,
            finish,
        )

    def resolve(self, finish: Finish | None) -> None:
        if not self.future.done():
            self.future.set_result(self.generation(finish))


class FakeEngine:
    """`actors.rollout.engine.Engine`: continuous batching over slots, interrupted by updates.

    `made` are weight files that are not on the disk; see `ops.sim.weights`.
    """

    def __init__(self, process: Process, disk: Disk, made: Mapping[str, str]) -> None:
        scenario = process.world.scenario
        self.version = -1
        self.slots = scenario.slots
        self._process = process
        self._disk = disk
        self._made = made
        self._episodes = scenario.episodes > 0
        self._drain = scenario.on_update == "drain"
        self._mean_tokens = scenario.mean_tokens
        self._digest = ""
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._updates: deque[tuple[int, str, asyncio.Future[None]]] = deque()
        self._wake = asyncio.Event()
        self._handed_over = False
        self._closed = False
        self._tokens = 0
        self._passes = 0
        self._decoding: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See `Engine.start`."""
        self._decoding = asyncio.create_task(self._decode(), name="decodes")

    async def generate(self, request: Request) -> Generation:
        """See `Engine.generate`."""
        self._serving()
        if len(request.prompt_tokens) > CONTEXT_MAX:
            raise ContextTooLongError(f"{len(request.prompt_tokens)} tokens leave no room for an answer")
        asked = asked_of(request.seed, request.prompt_tokens if self._episodes else ())
        row = _Row(request, asked, length_of(request.seed, self._mean_tokens))
        if row.finish is not None:
            return row.generation(row.finish)
        if self._handed_over:
            return request.unfinished()
        self._waiting.append(row)
        self._wake.set()
        try:
            return await row.future
        finally:  # finished, or its caller was cancelled
            if row in self._waiting:
                self._waiting.remove(row)
            if row in self._running:
                self._running.remove(row)

    async def update(self, version: int, path: str | Path, base: str | Path | None = None) -> None:
        """See `Engine.update`."""
        self._serving()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._updates.append((version, str(path), future))
        self._wake.set()
        await future

    def lengths(self) -> dict[str, int]:
        """See `Engine.lengths`."""
        return {row.request.sample_id: len(row.tokens) for row in self._running}

    def tokens(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """See `Engine.tokens`."""
        named = ((row.request.sample_id, row.tokens) for row in self._running)
        return {name: tuple(tokens[starts[name] :]) for name, tokens in named if name in starts}

    def snapshot(self, sample_id: str) -> Generation | None:
        """See `Engine.snapshot`."""
        return next((row.generation(None) for row in self._running if row.request.sample_id == sample_id), None)

    async def failed(self) -> None:
        """See `Engine.failed`."""
        await asyncio.Event().wait()

    async def hand_over(self) -> None:
        """See `Engine.hand_over`."""
        self._serving()
        self._handed_over = True
        self._release()

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        self._release()
        if self._decoding is not None:
            self._decoding.cancel()
            await asyncio.wait([self._decoding])

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return EngineStats(len(self._running), len(self._waiting), self._tokens, self._passes, 0.0, 0.0)

    def _serving(self) -> None:
        if self._closed or self._decoding is None:
            raise EngineClosedError("the engine is closed, or was not started")
        if self._decoding.done():
            self._decoding.result()

    def _release(self) -> None:
        for row in (*self._running, *self._waiting):
            if row.tokens and not row.future.done():
                self._process.handed_over.append((row.request.sample_id, len(row.tokens)))
            row.resolve(None)
        self._running.clear()
        self._waiting.clear()

    async def _decode(self) -> None:
        scenario, dice = self._process.world.scenario, self._process.dice("engine")
        while True:
            if not self._running and not self._waiting and not self._updates:
                self._wake.clear()
                await self._wake.wait()
            while self._updates and not (self._drain and self._running):
                await asyncio.sleep(dice.expovariate(1 / scenario.swap_s))
                await self._process.ready()
                self._load(*self._updates.popleft())
            while self._waiting and len(self._running) < self.slots and not self._updates:
                self._running.append(self._waiting.popleft())
            if self._running:
                await asyncio.sleep(scenario.token_s * dice.uniform(0.5, 1.5))
                await self._process.ready()
                self._step()

    def _load(self, version: int, path: str, future: asyncio.Future[None]) -> None:
        contents = self._made.get(path) or self._disk.weights.get(path)
        if contents is None:
            self._process.world.count("weights were collected before an engine had them")
            if not future.done():
                future.set_exception(WeightsError(f"{path} is gone"))
            return
        if self._running:
            self._process.world.count("an update interrupted samples")
        self.version, self._digest = version, digest_of(contents.encode())
        self._process.world.note(f"holds version {version}, {len(self._running)} samples go on")
        if not future.done():
            future.set_result(None)

    def _step(self) -> None:
        self._passes += 1
        self._tokens += len(self._running)
        done: list[_Row] = []
        for row in self._running:
            row.append(self.version, self._digest)
            if row.finish is not None:
                done.append(row)
        for row in done:
            self._running.remove(row)
            row.resolve(row.finish)
