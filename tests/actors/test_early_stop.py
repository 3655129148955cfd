"""A hopeless answer costs as much as a good one. Where it is cut must follow from its tokens, not from who looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.rollout import actor, early_stop
from actors.rollout.actor import RolloutWorker
from actors.rollout.config import Repetition, RolloutConfig, StopEarly
from actors.rollout.early_stop import Cut, EarlyStop, Guard, repeats, shortened
from actors.rollout.engine import EngineStats, Generation, Request, Sampling
from actors.rollout.turns import partial_of
from bus.memory import MemoryBus, MemoryHub
from bus.table import PARTIALS, PROMPTS, ROLLOUT_WORKERS, ROLLOUTS, WEIGHTS
from bus.weights import Local
from schemas import Prompt, Rollout, UserError, WeightVersion

LOOP = Repetition(period=3, times=4, tokens=8)
MAX_NEW = 200


def text_of(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def early(predicate: Any = None, **config: Any) -> EarlyStop:
    return EarlyStop(StopEarly(**{"every": 10, **config}), MAX_NEW, text_of, predicate)


def repeats_naively(tokens: Sequence[int], rule: Repetition) -> bool:
    """The twin: every unit, laid side by side, backwards."""
    for period in range(1, rule.period + 1):
        span = max(period * rule.times, rule.tokens)
        if span <= len(tokens):
            tail = list(tokens[-span:])
            unit = tail[-period:]
            if all(tail[-1 - i] == unit[-1 - i % period] for i in range(span)):
                return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.integers(0, 8),
    st.builds(Repetition, period=st.integers(1, 5), times=st.integers(2, 4), tokens=st.integers(4, 12)),
)
def test_a_loop_is_what_its_twin_calls_one(before: list[int], unit: list[int], times: int, rule: Repetition) -> None:
    tokens = before + unit * times
    assert repeats(tokens, rule) == repeats_naively(tokens, rule)


def test_a_loop_must_last_and_reach_to_the_end() -> None:
    assert repeats([9, 1, 2, 1, 2, 1, 2, 1, 2], LOOP)
    assert not repeats([1, 2, 1, 2, 1, 2, 1, 2, 9], LOOP)
    assert not repeats([9, 1, 2, 1, 2, 1, 2], LOOP)
    assert not repeats([7, 7, 7, 7], LOOP), "four of a kind are no loop: it must be eight tokens long"


def test_an_answer_that_has_not_come_to_its_end_when_little_is_left_is_given_up() -> None:
    judge = early(budget={"marker": "77", "reserve": 50})
    assert judge.cut([1] * 149) is None
    assert judge.cut([1] * 180) == Cut(150, "budget")
    assert judge.cut([77] + [1] * 179) is None


def test_a_turn_has_a_budget_of_its_own() -> None:
    """The recipe's would leave a shorter turn to end in the midst of its thoughts; none fits one of all reserve."""
    budget = early(budget={"marker": "99", "reserve": 50})
    assert budget.cut(range(100), max_new_tokens=90) == Cut(40, "budget")
    assert budget.cut(range(100), max_new_tokens=50) is None
    assert budget.cut(range(100)) is None


def test_the_predicate_sees_the_text_so_far_and_its_failure_has_a_remedy() -> None:
    seen: list[str] = []

    def hopeless(text: str) -> bool:
        seen.append(text)
        return "5" in text

    assert early(hopeless).cut([1] * 15 + [5] + [1] * 20) == Cut(20, "predicate")
    assert [len(text.split()) for text in seen] == [10, 20]
    with pytest.raises(UserError, match="predicate failed with ZeroDivisionError") as caught:
        early(lambda text: bool(1 / 0)).cut([1] * 10)
    assert caught.value.remedy


@given(st.lists(st.integers(0, 1), max_size=120), st.lists(st.integers(0, 120), max_size=5))
def test_it_does_not_matter_when_anybody_looks(tokens: list[int], looks: list[int]) -> None:
    """A slow worker that looks once and a quick one that looks often cut at the same token."""
    judge = early(repetition=LOOP)
    whole = judge.cut(tokens)
    checked = 0
    for length in sorted(min(look, len(tokens)) for look in looks):
        found = judge.cut(tokens[:length], checked)
        if found is not None:
            assert found == whole
            return
        checked = length
    assert judge.cut(tokens, checked) == whole


def test_what_is_kept_keeps_its_logprobs_and_versions() -> None:
    whole = Generation("s", (1,), (1, 2, 3, 4, 5), (-1.0, -2.0, -3.0, -4.0, -5.0), ((3, 2), (4, 2), (5, 1)), "stop")
    cut = shortened(whole, 3)
    assert (cut.tokens, cut.logprobs, cut.segments, cut.finish) == (
        (1, 2, 3), (-1.0, -2.0, -3.0), ((3, 2), (4, 1)), "length",
    )  # fmt: skip


def test_a_reserve_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="every answer would be given up"):
        RolloutConfig(max_new_tokens=50, stop_early=StopEarly(budget={"marker": "x", "reserve": 50}))


class SlowEngine:
    """Writes a scripted answer, ten tokens each `turn_s`. What is cancelled is freed."""

    version, slots = 0, 8

    def __init__(self, script: dict[str, list[int]], turn_s: float = 0.01) -> None:
        self.script = script
        self.turn_s = turn_s
        self.running: dict[str, Generation] = {}

    async def start(self) -> None:
        pass

    async def failed(self) -> None:
        await asyncio.Event().wait()

    async def update(self, version: int, path: Any, base: Any = None) -> None:
        self.version = version

    async def generate(self, request: Request) -> Generation:
        answer = self.script[request.sample_id]
        try:
            for end in range(0, len(answer), 10):
                self.running[request.sample_id] = self._of(request, answer[:end], None)
                await asyncio.sleep(self.turn_s)
            return self._of(request, answer, "stop" if len(answer) < MAX_NEW else "length")
        finally:
            self.running.pop(request.sample_id, None)

    def _of(self, request: Request, tokens: list[int], finish: Any) -> Generation:
        segments = ((self.version, len(tokens)),) if tokens else ()
        return Generation(
            request.sample_id, request.prompt_tokens, tuple(tokens), (-1.0,) * len(tokens), segments, finish
        )

    def lengths(self) -> dict[str, int]:
        return {name: len(generation.tokens) for name, generation in self.running.items()}

    def tokens(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {name: self.running[name].tokens[start:] for name, start in starts.items() if name in self.running}

    def snapshot(self, sample_id: str) -> Generation | None:
        return self.running.get(sample_id)

    async def hand_over(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), 0, 0, 0, 0.0, 0.0)


LOOPING = [1, 2, 3, 4, 5] + [7, 8] * 97 + [9]  # 200 tokens, in a loop from the sixth on
GOOD = list(range(40))


def request(name: str) -> Request:
    return Request(name, (1,), Sampling(MAX_NEW), 0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_stop, "LOOK_EVERY_S", 0.01)


async def test_a_looping_answer_is_given_up_while_it_runs_and_a_good_one_is_left_alone() -> None:
    engine = SlowEngine({"0-0": LOOPING, "0-1": GOOD})
    guard = Guard(engine, early(repetition=LOOP))
    watching = asyncio.create_task(guard.watch())
    try:
        (looped, cut, saved), (good, uncut, _) = await asyncio.gather(
            guard.generate(request("0-0")), guard.generate(request("0-1"))
        )
    finally:
        watching.cancel()
    assert cut == Cut(20, "repetition")
    assert (looped.tokens, looped.finish) == (tuple(LOOPING[:20]), "length")
    assert 0 < saved <= MAX_NEW - 20
    assert (guard.stopped, guard.saved_tokens) == (1, saved)
    assert (good.tokens, good.finish, uncut) == (tuple(GOOD), "stop", None)
    assert not engine.running, "the slot of what was given up is free"


async def test_an_answer_that_ends_before_anybody_looks_is_cut_at_the_same_token() -> None:
    """Nothing is saved then, but what is trained is the same."""
    guard = Guard(SlowEngine({"0-0": LOOPING}, turn_s=0.0), early(repetition=LOOP))
    generation, cut, saved = await guard.generate(request("0-0"))
    assert cut == Cut(20, "repetition")
    assert (generation.tokens, generation.finish, saved) == (tuple(LOOPING[:20]), "length", 0)


async def test_what_a_turn_saved_is_of_its_own_bound() -> None:
    engine = SlowEngine({"0-0": LOOPING})
    guard = Guard(engine, early(repetition=LOOP))
    watching = asyncio.create_task(guard.watch())
    try:
        generation, _, saved = await guard.generate(Request("0-0", (1,), Sampling(100), 0))
    finally:
        watching.cancel()
    assert 0 < saved <= 100 - len(generation.tokens)


async def test_a_sample_that_is_given_out_twice_at_once_is_answered_twice() -> None:
    """A prompt may stand in the log twice; both may come to the same worker, which must not die of it."""
    guard = Guard(SlowEngine({"0-0": GOOD}), early(repetition=LOOP))
    watching = asyncio.create_task(guard.watch())
    try:
        first = asyncio.create_task(guard.generate(request("0-0")))
        await asyncio.sleep(0.015)
        second = await guard.generate(request("0-0"))
        assert (await first)[0].tokens == second[0].tokens == tuple(GOOD)
    finally:
        watching.cancel()
    assert not guard._running


class FakeTokenizer:
    def encode_prompt(self, prompt: Any) -> tuple[int, ...]:
        return (1, 2)

    def decode(self, tokens: Sequence[int]) -> str:
        return text_of(tokens)


class NoWeights:
    async def fetch(self, event: WeightVersion) -> Local:
        return Local("v0")  # type: ignore[arg-type]

    def close(self) -> None:
        pass


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus("run", MemoryHub())
    await bus.connect()
    await bus.setup()
    yield bus
    await bus.close()


async def run_worker(bus: MemoryBus, worker: RolloutWorker, rollouts: int) -> list[Rollout]:
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    found: list[Rollout] = []
    async with asyncio.timeout(30):
        async for entry in bus.read(ROLLOUTS):
            message = entry.message()
            assert isinstance(message, Rollout)
            found.append(message)
            if len(found) == rollouts:
                break
    stop.set()
    await running
    return found


async def test_the_log_says_why_an_answer_was_given_up_and_what_that_saved(bus: MemoryBus) -> None:
    """As an answer that was cut: rewards and losses treat it like one that was too long."""
    for index in range(2):
        await bus.publish(Prompt(group_id=0, index=index, group_size=2, prompt="p", task={}, seed=1, min_version=0))
    worker = RolloutWorker(
        bus, RolloutConfig(max_new_tokens=MAX_NEW), SlowEngine({"0-0": LOOPING, "0-1": GOOD}), FakeTokenizer(), (),
        NoWeights(), "rollout-0", early(repetition=LOOP),
    )  # fmt: skip
    looped, good = sorted(await run_worker(bus, worker, 2), key=lambda rollout: rollout.index)
    assert (looped.finish, looped.stopped, len(looped.tokens)) == ("length", "repetition", 20)
    assert looped.saved > 0
    assert looped.text == text_of(LOOPING[:20])
    assert np.array_equal(looped.logprobs, np.full(20, -1.0, "<f4"))
    assert (good.finish, good.stopped, good.saved) == ("stop", "", 0)
    gauges = worker._read_gauges()
    assert (gauges["stopped_early"], gauges["saved_tokens"]) == (1, looped.saved)


async def test_of_what_was_saved_of_samples_that_have_ended_nothing_is_kept(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they ended: handed over, dropped or finished. A worker meets millions of them."""
    monkeypatch.setattr(actor, "PARTIALS_EVERY_S", 0.01)
    engine = SlowEngine({"0-0": list(range(400))})
    config = RolloutConfig(slots=8, max_new_tokens=MAX_NEW, partial_every=10)
    worker = RolloutWorker(bus, config, engine, FakeTokenizer(), (0,), NoWeights(), "rollout-0")
    saving = asyncio.create_task(worker._save_partials())
    generating = asyncio.create_task(engine.generate(request("0-0")))
    try:
        async with asyncio.timeout(20):
            while not worker._saved:
                await asyncio.sleep(0.01)
            generating.cancel()
            while worker._saved:
                await asyncio.sleep(0.01)
    finally:
        saving.cancel()
    assert await bus.last(PARTIALS, "0-0") is not None


async def test_the_tokens_of_an_answer_on_its_way_pay_for_more_deliveries(bus: MemoryBus) -> None:
    """It is handed over whenever a machine leaves, and would have been dropped at the twentieth."""
    worker = RolloutWorker(bus, RolloutConfig(), SlowEngine({}), FakeTokenizer(), (), NoWeights(), "rollout-0")
    await bus.publish(Prompt(group_id=0, index=0, group_size=1, prompt="p", task={}, seed=1, min_version=0))
    (entry,) = await bus.get(PROMPTS, [1])
    assert await worker._more_deliveries(entry) == 0
    saved = Generation("0-0", (1,), (5,) * 3200, (-1.0,) * 3200, ((0, 3200),), None)
    await bus.publish(partial_of(saved, "rollout-1"))
    assert await worker._more_deliveries(entry) == 100


async def test_a_worker_leaves_that_has_no_weights_yet(bus: MemoryBus) -> None:
    engine = SlowEngine({})
    engine.version = -1
    stop = asyncio.Event()
    worker = RolloutWorker(bus, RolloutConfig(), engine, FakeTokenizer(), (), NoWeights(), "late")
    running = asyncio.create_task(worker.run(stop))
    await asyncio.sleep(0.05)
    stop.set()
    async with asyncio.timeout(5):
        await running


async def test_a_worker_that_joins_takes_no_prompt_before_it_has_weights(bus: MemoryBus) -> None:
    """Large ones take minutes. What it took, those that have theirs could have begun."""

    class Withheld(NoWeights):
        allowed = asyncio.Event()

        async def fetch(self, event: WeightVersion) -> Local:
            await self.allowed.wait()
            return await super().fetch(event)

    engine = SlowEngine({"0-0": GOOD})
    engine.version = -1
    weights = Withheld()
    worker = RolloutWorker(bus, RolloutConfig(max_new_tokens=MAX_NEW), engine, FakeTokenizer(), (), weights, "late")
    await bus.publish(Prompt(group_id=0, index=0, group_size=1, prompt="p", task={}, seed=1, min_version=0))
    await bus.publish(WeightVersion(version=0, path="v0", digest="sha256-0", nbytes=1))
    serving = asyncio.create_task(run_worker(bus, worker, 1))
    await asyncio.sleep(0.3)
    assert (await bus.backlog(ROLLOUT_WORKERS)).ack_pending == 0
    assert worker._read_gauges()["idle_why"] == "weights"
    weights.allowed.set()
    assert [rollout.finish for rollout in await serving] == ["stop"]


async def test_a_predicate_that_fails_ends_the_worker_with_what_to_do(bus: MemoryBus) -> None:
    await bus.publish(Prompt(group_id=0, index=0, group_size=1, prompt="p", task={}, seed=1, min_version=0))
    worker = RolloutWorker(
        bus, RolloutConfig(max_new_tokens=MAX_NEW), SlowEngine({"0-0": GOOD}), FakeTokenizer(), (),
        NoWeights(), "rollout-0", early(lambda text: bool(1 / 0)),
    )  # fmt: skip
    with pytest.raises(UserError, match="stop_early"):
        await asyncio.wait_for(worker.run(asyncio.Event()), 30)
    assert (await bus.info(WEIGHTS)).messages == 0
