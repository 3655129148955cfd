"""A swap is cheap or dear by the way that it is taken: a table of one way alone, or both as one, would hide it."""

from __future__ import annotations

from ops.bench_swap import Swap, report

SPEC = {"name": "a-model", "dtype": "float32", "slots": 4, "on_update": ["keep", "recompute"]}


def test_each_way_has_a_line_of_its_own_with_what_it_is_down_and_what_it_loses() -> None:
    swaps = [
        Swap("keep", 0.2, 0.2, 0.2, 0.0, 0.5, 0.5),
        Swap("keep", 0.4, 0.5, 0.4, 0.0, 0.4, 0.6),
        Swap("recompute", 0.7, 2.3, 0.3, 2.0, 0.5, 0.5),
    ]
    lines = report(swaps, {"nothing": 50.0, "new weights": 49.0}, SPEC, "a machine").splitlines()
    assert "| keep | 2 | 0.400 | 0.500 | 0.400 | 0.000 | 0.400 | 0.600 | 0.40 |" in lines
    assert "| recompute | 1 | 0.700 | 2.300 | 0.300 | 2.000 | 0.500 | 0.500 | 0.70 |" in lines
    assert "| keep | **0.30** | 0.40 | 0.35 |" in lines
    assert "| recompute | **0.70** | 0.70 | 2.30 |" in lines
    assert "| new weights | 49.0 | 0.980 |" in lines
    assert any(line.startswith("a-model in float32") for line in lines)
