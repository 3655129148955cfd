"""A failing run is passed on as one line: what is read from it must be what was printed."""

import dataclasses

import pytest

from ops.sim.scenario import FAULTS, Dice, Scenario, draw
from schemas import UserError


@pytest.mark.parametrize("seed", range(20))
def test_a_scenario_is_read_as_it_was_printed(seed: int) -> None:
    scenario = dataclasses.replace(draw(seed), only=("kill:3", "lost_ack:1"))
    assert Scenario.from_json(scenario.to_json()) == scenario


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "no scenario"),
        ("[]", "no scenario"),
        ('{"seed": 1, "sed": 2}', "sed"),
        ('{"seed": 1, "later": {"sed": 2}}', "sed"),
        ("{}", "seed"),
    ],
)
def test_what_is_no_scenario_is_refused_with_the_remedy(text: str, word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        Scenario.from_json(text)
    assert "rollstream sim" in caught.value.remedy


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(UserError, match=r"'flood'.*kill"):
        Scenario.from_json('{"seed": 1, "faults": {"flood": 0.1}}')


def test_seeds_differ_in_everything() -> None:
    drawn = [draw(seed) for seed in range(300)]
    for field in dataclasses.fields(Scenario):
        if field.name not in ("seed", "faults", "only"):
            assert len({repr(getattr(scenario, field.name)) for scenario in drawn}) > 1, field.name
    assert {kind for scenario in drawn for kind in scenario.faults} == set(FAULTS)
    assert any(not scenario.faults for scenario in drawn)


def test_one_stream_of_dice_does_not_shift_another() -> None:
    plain, busy = Dice(7), Dice(7)
    busy("network").random()
    assert plain("disk").random() == busy("disk").random()
    assert Dice(8)("disk").random() != Dice(7)("disk").random()
