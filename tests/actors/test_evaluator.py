"""The evaluator may lag, die and be one of several: what stands in the log must be each version's own, once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.evaluator.actor import Evaluator
from actors.evaluator.best import best_of
from actors.evaluator.config import EvaluationConfig
from actors.evaluator.held_out import HeldOut, Problem
from actors.evaluator.pins import Pins
from actors.evaluator.schedule import Schedule, lease_name
from actors.reward.verdict import RewardRequest, Verdict
from actors.rollout.engine import ContextTooLongError, EngineStats, Generation, Request, Sampling
from bus.memory import MemoryBus, MemoryHub
from bus.table import EVALUATIONS, LEASES
from bus.weights import Local, WeightsMissing
from schemas import Evaluation, WeightVersion

RUN, DATA, STEPS = "evaluated", "held-out", 6
DEADLINE_S = 30.0
PROBLEMS = [Problem(f"{k}+1=", (k + 1,), {"answer": str(k + 1)}) for k in range(4)]


class FakeEngine:
    """Answers with its version, once `may_answer` is set. Its weights are files that hold their version."""

    def __init__(self) -> None:
        self.version = 0
        self.slots = 4
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked: list[int] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, request: Request) -> Generation:
        self.asked.append(self.version)
        await self.may_answer.wait()
        if request.prompt_tokens == (4,):
            raise ContextTooLongError("no room")
        tokens = (self.version + 1, *[9] * request.prompt_tokens[0])
        segments = ((self.version, len(tokens)),)
        return Generation(request.sample_id, request.prompt_tokens, tokens, (0.0,) * len(tokens), segments, "stop")

    async def update(self, version: int, path: str | Path, *more: Any) -> None:
        assert Path(path).read_text() == str(version)
        self.version = version

    def lengths(self) -> dict[str, int]:
        return {}

    def tokens(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {}

    def snapshot(self, sample_id: str) -> Generation | None:
        return None

    async def hand_over(self) -> None: ...

    async def failed(self) -> None:
        await asyncio.Event().wait()

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0.0, 0.0)


class FakePool:
    """Rewards an answer with its version, but for the verdicts that are planned by problem."""

    def __init__(self, planned: Mapping[str, Verdict] | None = None) -> None:
        self.planned = planned or {}

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, request: RewardRequest) -> Verdict:
        made_by = float(int(request.response.split()[0]) - 1)
        return self.planned.get(request.sample_id) or Verdict("scored", made_by, {"version": made_by})


@dataclasses.dataclass
class Run:
    """A run's log and its folder of weights, of which only the newest and the first are kept."""

    folder: Path
    hub: MemoryHub = dataclasses.field(default_factory=MemoryHub)

    @property
    def bus(self) -> MemoryBus:
        return MemoryBus(RUN, self.hub)

    async def announce(self, version: int) -> None:
        if version > 1:
            (self.folder / f"v{version - 1}").unlink()
        (self.folder / f"v{version}").write_text(str(version))
        event = WeightVersion(version=version, path=f"v{version}", digest="d", nbytes=1)
        await self.bus.publish_fenced([event], version)

    async def announce_all(self, evaluator: Evaluator) -> None:
        """One version after another, each once the newest that was due is evaluated."""
        for version in range(STEPS + 1):
            await self.announce(version)
            due = version - version % 2
            await until(lambda due=due: due in evaluator.schedule.done)  # type: ignore[misc]

    async def fetch(self, event: WeightVersion) -> Local:
        if not (self.folder / event.path).exists():
            raise WeightsMissing(f"{event.path} was collected")
        return Local(self.folder / event.path)

    def close(self) -> None: ...

    def evaluator(
        self, name: str = "evaluator-0", pool: FakePool | None = None, every: int = 2, **config: Any
    ) -> Evaluator:
        held_out = HeldOut(DATA, PROBLEMS, Sampling(8, temperature=0.0), lambda tokens: " ".join(map(str, tokens)))
        pins = Pins(self.folder / name, self)
        settings = EvaluationConfig(every=every, count=len(PROBLEMS), **config)
        return Evaluator(self.bus, settings, STEPS, held_out, FakeEngine(), pool or FakePool(), pins, name)

    async def evaluations(self) -> list[Evaluation]:
        messages = [entry.message() for entry in self.hub.runs[RUN].logs[EVALUATIONS.name].entries.values()]
        assert all(isinstance(message, Evaluation) for message in messages)
        return messages  # type: ignore[return-value]

    async def versions(self) -> list[int]:
        return [message.version for message in await self.evaluations()]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path)
    await run.bus.setup()
    async with asyncio.timeout(DEADLINE_S):
        yield run


@contextlib.asynccontextmanager
async def working(evaluator: Evaluator) -> AsyncIterator[asyncio.Task[None]]:
    """The evaluator at work; at the end it is killed, if it has not ended by itself. Raises what it died of."""
    task = asyncio.create_task(evaluator.run(asyncio.Event()))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.005)


def engine_of(evaluator: Evaluator) -> FakeEngine:
    assert isinstance(evaluator.engine, FakeEngine)
    return evaluator.engine


async def test_every_due_version_is_evaluated_by_its_own_weights(run: Run) -> None:
    """0, 2, 4 and 6, each by itself: the reward is the version that answered."""
    evaluator = run.evaluator()
    async with working(evaluator) as task:
        await run.announce_all(evaluator)
        await task
    messages = await run.evaluations()
    assert [(message.version, message.reward) for message in messages] == [(v, float(v)) for v in (0, 2, 4, 6)]
    first = messages[0]
    assert (first.count, first.verdicts, first.parts) == (4, {"scored": 3.0, "error": 1.0}, {"version": 0.0})
    assert (first.finished, first.response_length) == (0.75, (2 + 3 + 4 + 0) / 4)
    assert list(run.folder.glob("evaluator-0*")) == []


async def test_a_version_that_is_collected_while_another_is_evaluated_is_still_evaluated(run: Run) -> None:
    """It is pinned when it is announced; those that came due before it are skipped, and named."""
    evaluator = run.evaluator()
    engine_of(evaluator).may_answer.clear()

    def pinned() -> list[str]:
        return [path.name for path in (run.folder / "evaluator-0").glob("v*")]

    async with working(evaluator) as task:
        await run.announce(0)
        await until(lambda: len(engine_of(evaluator).asked) == len(PROBLEMS))
        for version in range(1, 6):
            await run.announce(version)
            due = f"v{version - version % 2:06d}.safetensors"
            await until(lambda due=due: due == "v000000.safetensors" or pinned() == [due])  # type: ignore[misc]
        assert not (run.folder / "v4").exists()
        engine_of(evaluator).may_answer.set()
        await until(lambda: 4 in evaluator.schedule.done)
        await run.announce(6)
        await task
    messages = await run.evaluations()
    assert [(m.version, m.reward, m.skipped.tolist()) for m in messages] == [(0, 0.0, []), (4, 4.0, [2]), (6, 6.0, [])]


async def test_a_killed_evaluator_begins_again_where_the_log_says(run: Run) -> None:
    """What was in hand is done by who comes after it, of the same bytes, although these were collected meanwhile."""
    killed = run.evaluator()
    async with working(killed):
        for version in range(3):
            await run.announce(version)
        await until(lambda: {0, 2} <= killed.schedule.done)
        engine_of(killed).may_answer.clear()
        for version in (3, 4):
            await run.announce(version)
        await until(lambda: engine_of(killed).asked[-1] == 4)
    await run.announce(5)
    again = run.evaluator()
    async with working(again) as task:
        await until(lambda: 4 in again.schedule.done)
        await run.announce(6)
        await task
    assert engine_of(again).asked == [4] * len(PROBLEMS) + [6] * len(PROBLEMS)
    assert [(m.version, m.reward) for m in await run.evaluations()] == [(v, float(v)) for v in (0, 2, 4, 6)]


async def test_two_evaluators_share_the_versions(run: Run) -> None:
    """No version is asked twice, and one that is in the other's hands is not skipped."""
    one, two = run.evaluator("evaluator-0"), run.evaluator("evaluator-1")
    async with working(one) as first:
        await run.announce(0)
        await until(lambda: 0 in one.schedule.done)
        engine_of(one).may_answer.clear()
        for version in (1, 2):
            await run.announce(version)
        await until(lambda: engine_of(one).asked[-1] == 2)
        async with working(two) as second:
            for version in (3, 4):
                await run.announce(version)
            await until(lambda: 4 in two.schedule.done)
            assert 2 not in two.schedule.done
            engine_of(one).may_answer.set()
            await until(lambda: 2 in two.schedule.done)
            for version in (5, 6):
                await run.announce(version)
            await asyncio.gather(first, second)
    assert [message.version for message in await run.evaluations()] == [0, 4, 2, 6]
    assert not set(engine_of(one).asked) & set(engine_of(two).asked)
    assert all(not len(message.skipped) for message in await run.evaluations())


async def test_who_lost_its_lease_and_is_slower_writes_nothing(run: Run) -> None:
    """A stalled evaluator wakes up after another has done its version: the log keeps the first word."""
    slow, quick = run.evaluator("slow"), run.evaluator("quick")
    engine_of(slow).may_answer.clear()
    async with working(slow):
        await run.announce(0)
        await until(lambda: bool(engine_of(slow).asked))
        lease = await run.bus.last(LEASES, lease_name(0))
        assert lease is not None
        await run.bus.release(lease_name(0), lease.seq)
        await quick.once(0)
        engine_of(slow).may_answer.set()
        await until(lambda: 0 in slow.schedule.done)
        await asyncio.sleep(0.05)
        assert [(m.version, m.worker) for m in await run.evaluations()] == [(0, "quick")]


async def test_a_verdict_that_is_no_reward_is_counted_and_is_no_zero(run: Run) -> None:
    """A reward function that hangs would otherwise pull the mean down and name the wrong version as the best."""
    planned = {"eval-0": Verdict("timeout", detail="no answer"), "eval-1": Verdict("invalid", detail="a string")}
    await run.announce(0)
    await run.announce(1)
    await run.evaluator(pool=FakePool(planned)).once(1)
    (message,) = await run.evaluations()
    assert message.verdicts == {"timeout": 1, "invalid": 1, "scored": 1, "error": 1}
    assert message.reward == 1.0
    await run.announce(2)
    nothing = {f"eval-{k}": Verdict("timeout") for k in range(4)}
    await run.evaluator(pool=FakePool(nothing)).once(2)
    assert (await run.evaluations())[-1].reward is None
    assert best_of(await run.evaluations()) == message


async def test_one_that_takes_too_long_is_given_up_and_named(run: Run) -> None:
    """It must hold up neither the next version nor the end of the run."""
    evaluator = run.evaluator(timeout_s=1.0)
    engine_of(evaluator).may_answer.clear()
    async with working(evaluator) as task:
        for version in range(3):
            await run.announce(version)
        await until(lambda: 2 in evaluator.schedule.done)
        engine_of(evaluator).may_answer.set()
        for version in range(3, STEPS + 1):
            await run.announce(version)
        await task
    assert 2 not in await run.versions()
    assert (await run.versions())[-1] == STEPS


async def test_who_joins_late_takes_the_newest_and_then_the_first(run: Run) -> None:
    """Where the run began is always told; what lies between is skipped."""
    for version in range(5):
        await run.announce(version)
    late = run.evaluator()
    async with working(late):
        await until(lambda: {0, 4} <= late.schedule.done)
    messages = await run.evaluations()
    assert [(m.version, m.reward, m.skipped.tolist()) for m in messages] == [(4, 4.0, [2]), (0, 0.0, [])]


async def test_a_version_whose_bytes_are_gone_is_skipped(run: Run) -> None:
    """An evaluator that joins late finds versions that were collected before it came."""
    for version in range(6):
        await run.announce(version)
    late = run.evaluator()
    async with working(late) as task:
        await until(lambda: {0, 4} <= late.schedule.done)
        await run.announce(6)
        await task
    assert sorted(await run.versions()) == [0, 6]


@given(st.integers(0, 7), st.integers(1, 20), st.integers(0, 25), st.integers(0, (1 << 26) - 1))
def test_what_is_open_is_what_the_words_say(every: int, steps: int, newest: int, bits: int) -> None:
    """Against the sentence in the docs, version by version."""
    schedule = Schedule(every, steps, DATA)
    schedule.announced(newest)
    done = {version for version in range(newest + 1) if bits >> version & 1}
    for version in done:
        schedule.gave_up(version)
    last = max(steps, newest)
    expected = [
        version
        for version in range(newest, -1, -1)
        if version not in done and (version in (0, last) or (every and version % every == 0))
    ]
    assert schedule.open == expected
    assert schedule.finished == (newest >= steps and 0 in done and last in done)


def test_evaluations_on_another_set_do_not_count() -> None:
    """After a change of `data.eval` the versions are due anew."""
    schedule = Schedule(2, STEPS, DATA)
    other = Evaluation(version=0, data="another", reward=1.0, count=1, verdicts={"scored": 1})
    schedule.evaluated(other)
    assert schedule.open == [0]
    schedule.evaluated(dataclasses.replace(other, data=DATA))
    assert schedule.open == []


async def test_pins_outlive_what_they_are_of(tmp_path: Path) -> None:
    """Adapters with their base. Pinning again, and what a killed predecessor left half done, do no harm."""
    adapter, base = tmp_path / "v3", tmp_path / "v0"
    adapter.write_text("three")
    base.write_text("zero")

    class Weights:
        async def fetch(self, event: WeightVersion) -> Local:
            return Local(adapter, base)

        def close(self) -> None: ...

    event = WeightVersion(version=3, kind="adapter", base=0, path="v3", digest="d", nbytes=5)
    pins = Pins(tmp_path / "pins", Weights())
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins" / "v000003.tmp").write_text("thr")
    files = await pins.pin(event)
    adapter.unlink()
    base.unlink()
    assert await pins.pin(event) == files
    assert files.base is not None
    assert (files.path.read_text(), files.base.read_text()) == ("three", "zero")
    await pins.keep_only(lambda: {4})
    assert list((tmp_path / "pins").iterdir()) == []
    await pins.keep_only(set)
    assert not (tmp_path / "pins").exists()


async def test_a_version_is_pinned_twice_and_others_given_up_at_the_same_time(tmp_path: Path) -> None:
    """Who follows the announcements and who evaluates do so: neither takes the other's file away half made."""
    source = tmp_path / "v2"
    source.write_text("two")

    class Weights:
        async def fetch(self, event: WeightVersion) -> Local:
            return Local(source)

        def close(self) -> None: ...

    event = WeightVersion(version=2, path="v2", digest="d", nbytes=3)
    for k in range(50):
        pins = Pins(tmp_path / f"pins-{k}", Weights())
        one, other, _ = await asyncio.gather(pins.pin(event), pins.pin(event), pins.keep_only(lambda: {2}))
        assert one == other
        assert one.path.read_text() == "two"
