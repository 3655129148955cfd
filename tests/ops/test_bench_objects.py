"""The page on the object road quotes ratios: they must be of what they say, of both ways at the same bytes."""

from __future__ import annotations

from ops.bench_objects import ORDER, Passage, measure_joining, measure_road, report_road

NBYTES = 300_000


async def test_each_way_is_measured_in_each_round_and_none_comes_first_always() -> None:
    rounds = await measure_road(NBYTES, 2)
    assert [sorted(passage.what for passage in round_) for round_ in rounds] == [sorted(ORDER)] * 2
    assert [round_[2].what for round_ in rounds] == ["client put", "road put"]
    assert all(passage.nbytes == NBYTES and passage.seconds > 0 for round_ in rounds for passage in round_)


async def test_the_clients_get_without_a_buffer_is_measured_at_the_sizes_that_are_told() -> None:
    passages = await measure_joining((1000, NBYTES))
    assert sorted((passage.what, passage.nbytes) for passage in passages) == [
        (what, nbytes) for what in sorted(ORDER[2:]) for nbytes in (1000, NBYTES)
    ]


def test_the_ratios_are_of_medians() -> None:
    def round_(client: float, road: float) -> list[Passage]:
        seconds = (0.5, 2.0, client, 3 * client, road, 2 * road)
        return [Passage(what, 10**9, s, s / 2, s / 2) for what, s in zip(ORDER, seconds, strict=True)]

    joining = [Passage(what, 32_000_000, s, 0.0, 0.0) for what, s in zip(ORDER[2:], (1.0, 7.0, 0.5, 0.5), strict=True)]
    lines = report_road([round_(90.0, 9.0), round_(8.0, 1.0), round_(6.0, 2.0)], joining)
    assert "| road put | 2.00 | 500 | 1.00 | 1.00 | **4.0** | 4.0 |" in lines
    assert "| road get | 4.00 | 250 | 2.00 | 2.00 | **6.0** | 6.0 |" in lines
    assert "| road, put and get | 6.00 | 333 | | | **5.3** | 5.3 |" in lines
    assert lines[-1] == "| 32 | 1.00 | 7.00 | 0.50 | 0.50 | **8.0** |"
