"""What `rollstream chaos` measures must be what it says: who is hit, how often, and when a fault counts as healed."""

from collections import Counter

import pytest

from ops.chaos.command import kinds_of
from ops.chaos.faults import KINDS, Dice, Fault, Kind
from ops.chaos.recovery import Started, Stored, recoveries
from schemas import UserError


def kill(kind: Kind, victim: str, at_s: float) -> Fault:
    return Fault(kind, victim, 1, at_s, at_s)


def stop(kind: Kind, victim: str, at_s: float, ended_s: float) -> Fault:
    return Fault(kind, victim, 1, at_s, ended_s, stop=True)


def seconds(faults: list[Fault], log: list[Stored], starts: list[Started], end_s: float = 100.0) -> list[float]:
    return [pytest.approx(recovery.seconds) for recovery in recoveries(faults, log, starts, end_s)]


def test_every_kind_is_killed_equally_often_in_an_order_that_the_seed_draws() -> None:
    """`--kills 200` promises each kind its share, also the rare ones."""

    def kills(seed: int) -> list[Kind]:
        dice = Dice(seed)
        strikes = [dice.draw() for _ in range(400)]
        return [strike.kind for strike in strikes if not strike.stop_s][:200]

    assert set(Counter(kills(0)).values()) == {25}
    assert kills(0) == kills(0) != kills(1)
    assert {strike.kind for strike in (Dice(3, ("nats", "trainer")).draw() for _ in range(50))} <= {"nats", "trainer"}


def test_faults_overlap_sometimes_and_are_stops_sometimes() -> None:
    dice = Dice(0)
    strikes = [dice.draw() for _ in range(1000)]
    assert 150 < sum(strike.close for strike in strikes) < 350
    stops = [strike for strike in strikes if strike.stop_s]
    assert 100 < len(stops) < 200
    assert {strike.kind for strike in stops} == set(KINDS)


@pytest.mark.parametrize(
    ("kind", "victim", "unlike", "like"),
    [
        ("trainer", "trainer", Stored(13.0, "batches"), Stored(14.0, "steps")),
        ("controller", "controller", Stored(13.0, "steps"), Stored(14.0, "prompts")),
        ("rollout", "rollout-1", Stored(13.0, "rollouts", "rollout-0"), Stored(14.0, "rollouts", "rollout-1")),
        ("reward", "reward-0", Stored(13.0, "scored", "reward-1"), Stored(14.0, "scored", "reward-0")),
    ],
)
def test_a_killed_actor_has_recovered_when_its_successor_does_the_same_work(
    kind: Kind, victim: str, unlike: Stored, like: Stored
) -> None:
    """What the dead one had sent comes a little later; and others' work is not its own."""
    last_words = Stored(10.5, like.stream, like.worker)
    starts = [Started(1.0, victim), Started(12.0, victim)]
    assert seconds([kill(kind, victim, 10.0)], [last_words, unlike, like], starts) == [4.0]


def test_a_killed_server_has_recovered_when_anything_is_stored_again() -> None:
    log = [Stored(9.99, "rollouts"), Stored(10.05, "rollouts"), Stored(10.7, "scored")]
    assert seconds([kill("nats", "nats", 10.0)], log, []) == [0.7]  # what came at 10.05 was on its way


def test_a_killed_launcher_has_recovered_when_a_new_trainer_has_done_a_step() -> None:
    log = [Stored(10.5, "steps"), Stored(19.0, "steps")]
    assert seconds([kill("launcher", "launcher", 10.0)], log, [Started(15.0, "trainer")]) == [9.0]


def test_a_stopped_process_is_clocked_from_where_it_goes_on() -> None:
    log = [Stored(12.0, "steps"), Stored(17.0, "steps")]
    assert seconds([stop("trainer", "trainer", 10.0, 16.0)], log, []) == [1.0]


def test_a_process_that_is_hit_again_is_clocked_anew_but_one_that_is_hit_alone_is_not() -> None:
    faults = [kill("trainer", "trainer", 10.0), kill("reward", "reward-0", 11.0), kill("trainer", "trainer", 13.0)]
    starts = [Started(11.0, "trainer"), Started(11.5, "reward-0"), Started(14.0, "trainer")]
    log = [Stored(15.0, "steps"), Stored(16.0, "scored", "reward-0")]
    assert seconds(faults, log, starts) == [2.0, 5.0, 2.0]


def test_while_another_process_is_held_the_clock_stands() -> None:
    """Nobody can train without the verdicts of a worker that is held: that is the length of the other fault."""
    faults = [kill("trainer", "trainer", 10.0), stop("reward", "reward-0", 10.5, 15.0), stop("nats", "nats", 14, 16)]
    log = [Stored(17.0, "steps"), Stored(15.2, "scored", "reward-0"), Stored(16.3, "rollouts")]
    assert seconds(faults, log, [Started(11.0, "trainer")])[:2] == [1.5, 0.0]  # 0.5 s before, and 1 s after
    healed_meanwhile = [Stored(12.0, "steps"), *log]
    assert seconds(faults, healed_meanwhile, [Started(11.0, "trainer")])[0] == 0.5


def test_a_fault_is_alone_if_none_was_in_force_and_none_struck_until_it_had_healed() -> None:
    faults = [kill("trainer", "trainer", 10.0), kill("nats", "nats", 13.0), kill("nats", "nats", 20.0)]
    log = [Stored(12.0, "steps"), Stored(14.0, "prompts"), Stored(21.0, "prompts")]
    starts = [Started(11.0, "trainer")]
    assert [recovery.alone for recovery in recoveries(faults, log, starts, 30.0)] == [True, True, True]
    faults[1] = kill("nats", "nats", 11.5)
    assert [recovery.alone for recovery in recoveries(faults, log, starts, 30.0)] == [False, False, True]


def test_the_end_of_the_run_heals_everything() -> None:
    assert seconds([kill("controller", "controller", 10.0)], [], [Started(11.0, "controller")], end_s=13.0) == [3.0]


def test_an_unknown_kind_is_told_with_those_that_there_are() -> None:
    assert kinds_of([]) == KINDS
    assert kinds_of(["trainer", "nats"]) == ("nats", "trainer")
    with pytest.raises(UserError, match="gpu") as caught:
        kinds_of(["gpu"])
    assert "reward-child" in caught.value.remedy
