"""A soak that cannot fail proves nothing: its verdicts on memory, waste and age are tested on cases that are known."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bus.memory import MemoryBus, MemoryHub
from ops.soak.command import Soak
from ops.soak.memory import GROWTH_BYTES, Growth, Sample, growths, slope
from ops.soak.moves import FIRST, GAP_S, MOST, Moves
from ops.soak.report import report
from ops.soak.tokens import Account, Meter, account
from schemas import Batch, Dropped, Message, Partial, Rollout, StepDone

MB = 1 << 20
SECONDS = 600.0


def test_workers_go_from_two_to_six_to_one_and_on_and_a_seed_repeats() -> None:
    moves = [move for moves in [Moves(3)] for move in (moves.draw() for _ in range(200))]
    assert [move.workers for move in moves[:2]] == list(FIRST)
    assert moves == [move for moves in [Moves(3)] for move in (moves.draw() for _ in range(200))]
    for before, move in itertools.pairwise(moves):
        assert move.before == before.workers != move.workers
    for move in moves:
        assert 1 <= move.workers <= MOST
        assert GAP_S[0] <= move.gap_s <= GAP_S[1]
        assert set(move.killed) <= set(range(move.before))
    leaving = sum(max(0, move.before - move.workers) for move in moves)
    killed = sum(number >= move.workers for move in moves for number in move.killed)
    assert 0.35 < killed / leaving < 0.65
    assert any(number < move.workers for move in moves for number in move.killed), "one that stays is killed too"


def samples(name: str, per_minute: float, pid: int = 1, begin_s: float = 0.0, end_s: float = SECONDS) -> list[Sample]:
    """A process of 100 MB with noise and spikes that grows by so many MB a minute."""
    dice = Random(pid)
    return [
        Sample(at, name, pid, int(MB * (100 + per_minute * at / 60 + dice.random() + 40 * (dice.random() < 0.03))))
        for at in np.arange(begin_s, end_s, 2.0).tolist()
    ]


@pytest.mark.parametrize(("per_minute", "grows"), [(0.0, False), (0.3, False), (3.0, True)])
def test_a_leak_is_seen_through_noise_and_spikes(per_minute: float, grows: bool) -> None:
    (found,) = growths(samples("trainer", per_minute), SECONDS)
    assert found.grows == grows
    assert found.grown / MB == pytest.approx(per_minute * found.over_s / 60, abs=0.5)


def test_what_a_process_takes_while_it_warms_up_is_no_leak() -> None:
    filling = [Sample(at, "trainer", 1, int(MB * min(300, 100 + 2 * at))) for at in np.arange(0, SECONDS, 2.0).tolist()]
    (found,) = growths(filling, SECONDS)
    assert (found.median, found.grown) == (300 * MB, 0.0)


def test_workers_that_come_and_go_are_judged_together() -> None:
    """None of them lives long; a worker that begins with more than the one before has inherited a leak."""

    def lives(more: float) -> list[Sample]:
        spans = [(pid, 15.0 * pid) for pid in range(39)]
        return [
            Sample(s.at_s, s.name, s.pid, s.rss + int(more * MB * pid))
            for pid, begin in spans
            for s in samples(f"rollout-{pid % 3}", 0.0, pid + 1, begin, begin + 15)
        ]

    (calm,), (leaking,) = growths(lives(0.0), SECONDS), growths(lives(1.0), SECONDS)
    assert (calm.name, calm.grows) == ("rollout workers", False)
    assert leaking.grows
    assert leaking.lives == calm.lives > 15


def test_the_slope_is_that_of_the_line() -> None:
    assert slope([(x, 3.0 * x + 1) for x in range(50)]) == pytest.approx(3.0)
    assert slope([(1.0, 5.0)]) == 0.0


def test_the_meter_reckons_what_a_killed_worker_made_since_its_last_beat() -> None:
    meter = Meter()
    for second in range(3):
        meter.heard({"process": "host:7", "tokens_generated": 100 * second}, 1000.0 + second)
        meter.heard({"process": "host:8", "tokens_generated": 10 * second}, 1000.0 + second)
    meter.heard({"process": "host:9", "actor": "trainer"}, 1000.0)
    assert meter.tokens == 220
    meter.killed(7, 1002.5)
    assert meter.tokens == pytest.approx(270)
    meter.killed(99, 1002.5)
    assert meter.tokens == pytest.approx(270)


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus("run", MemoryHub())
    await bus.connect()
    await bus.setup()
    yield bus
    await bus.close()


def rollout(group: int, index: int, *segments: tuple[int, int]) -> Rollout:
    tokens = sum(count for _, count in segments)
    return Rollout(
        group_id=group, index=index, group_size=2, prompt="p", task={}, prompt_tokens=np.array([1], "<i4"),
        tokens=np.zeros(tokens, "<i4"), logprobs=np.zeros(tokens, "<f4"), segments=segments, finish="stop", text="",
    )  # fmt: skip


def partial(group: int, index: int, tokens: int) -> Partial:
    return Partial(
        group_id=group, index=index, tokens=np.zeros(tokens, "<i4"), logprobs=np.zeros(tokens, "<f4"),
        segments=((0, tokens),),
    )  # fmt: skip


async def test_every_token_is_accounted_for_once(bus: MemoryBus) -> None:
    """Of 200 generated: 100 finished (10 masked, 30 of a dropped sample), 15 handed over, 85 died."""
    batch = Batch(
        step=2, max_staleness=1, group_ids=np.array([0, 0], "<i8"), indices=np.array([0, 1], "<i4"),
        rollout_seqs=np.array([1, 2], "<i8"), rewards=np.array([0.0, 1.0], "<f8"), next_group=2,
    )  # fmt: skip
    messages: list[Message] = [
        rollout(0, 0, (0, 10), (2, 20)), rollout(0, 1, (2, 40)), rollout(1, 0, (1, 30)),
        partial(0, 1, 12), partial(1, 1, 15), batch, Dropped(group_id=1, index=0, reason="timeout", tokens=30),
        StepDone(step=2, version=3, metrics={}, staleness=np.array([60], "<i8")),
        StepDone(step=3, version=4, metrics={}, staleness=np.array([0, 20], "<i8")),
    ]  # fmt: skip
    for message in messages:
        await bus.publish(message)
    found = await account(bus, 200.0)
    assert (found.finished, found.unfinished, found.masked, found.dropped) == (100, 15, 10, {"timeout": 30})
    assert found.lost == 85
    assert found.discarded == pytest.approx((85 + 10 + 30) / 200)
    assert found.age == pytest.approx(20 / 80)
    assert (found.ages, found.steps) == ((60, 20), 2)


def test_the_report_shows_what_failed() -> None:
    from types import SimpleNamespace

    told = Account(1000.0, 990, 0, 0, {"stale": 20}, (10, 10), 7)
    audit = SimpleNamespace(clean=True, report=SimpleNamespace(checks=[], totals={}, ended=True))
    outcome = SimpleNamespace(
        seconds=60.0, moves=(), account=told, audit=audit, growths=(Growth("trainer", 1, 100 * MB, 400.0, 9.0 * MB),)
    )
    asked = Soak(Path("r.yaml"), ("a=1",), 1.0, 4)
    text = report(asked, outcome, "a machine")  # type: ignore[arg-type]
    assert "rollstream bench soak r.yaml a=1 --minutes 1 --seed 4" in text
    assert "| tokens discarded | 3.00% | ≤ 1% | ✗ |" in text
    assert "| mean age of trained tokens, versions | 0.50 | ≤ 1.5 | ✓ |" in text
    assert f"| trainer | 1 | 105 | +{9 * MB / 1e6:.1f} | 400 | ✗ |" in text
    assert GROWTH_BYTES < 9 * MB
