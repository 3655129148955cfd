"""What a model writes goes into tools: nothing of it may run, hang or grow without bound; errors are for the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.episode.multi_turn import discounted, feedback_of
from actors.episode.tool import Options, ToolUse
from actors.episode.tool_calls import parse_tool_calls
from actors.episode.tools import ToolError, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [("17*23", "391"), ("2 * (3 + 4) - 1", "13"), ("7/2", "3.5"), ("8/2", "4"), ("-2**2", "-4"), ("2**0.5 > 1", None)],
)
def test_the_calculator_does_arithmetic_and_nothing_else(expression: str, value: str | None) -> None:
    if value is None:
        with pytest.raises(ToolError):
            calculate(expression)
    else:
        assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "10**5000",
        "__import__('os')",
        "a",
        "'x'*9",
        "1/0",
        "(-1)**0.5",
        "1e999",
        "(" * 900,
        "1" * 2000,
        "True",
    ],
)
def test_what_is_no_bounded_arithmetic_is_told_to_the_model(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


def test_calls_are_read_and_malformed_ones_explained() -> None:
    text = 'a <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> <tool_call>{oh</tool_call> <tool_call>[]'
    first, second, third = parse_tool_calls(text)
    assert (first.name, first.arguments, first.error) == ("f", {"x": 1}, "")
    assert "not JSON" in second.error
    assert third.error
    (written,) = parse_tool_calls('<tool_call>{"name": "f", "parameters": "{\\"x\\": 1}"}')
    assert (written.arguments, written.error) == ({"x": 1}, "")
    (broken,) = parse_tool_calls('<tool_call>{"name": "f", "arguments": "{oh"}</tool_call>')
    assert "a map by name" in broken.error
    for half in ('"\\ud800"', '"a", "arguments": {"\\udc00": 1}', '"a", "arguments": "{\\"x\\": \\"\\\\ud800\\"}"'):
        (untold,) = parse_tool_calls(f'<tool_call>{{"name": {half}}}</tool_call>')
        assert (untold.name, untold.arguments, bool(untold.error)) == ("", {}, True), half


async def test_errors_slow_tools_and_long_answers_go_to_the_model(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        "import asyncio\n"
        "async def slow():\n    await asyncio.sleep(60)\n"
        "def bad(x: int):\n    raise KeyError(x)\n"
        "def long():\n    return 'x' * 999\n"
        "def half():\n    return 'a\\ud800'\n"
    )
    use = ToolUse(
        Options(tools=("t.py:slow", "t.py:bad", "t.py:long", "t.py:half"), timeout_s=0.5, output_chars=10), tmp_path
    )
    told = [
        await use._called(call)
        for call in parse_tool_calls(
            '<tool_call>{"name": "slow"}</tool_call><tool_call>{"name": "bad", "arguments": {"x": 1}}</tool_call>'
            '<tool_call>{"name": "bad"}</tool_call><tool_call>{"name": "long"}</tool_call>'
            '<tool_call>{"name": "none"}</tool_call><tool_call>{"name": "half"}</tool_call>'
        )
    ]
    assert all(answer.startswith("error: ") for answer in told[:3])
    assert told[3] == "xxxxxxxxxx ... (cut)"
    assert told[4].startswith("error: th")
    assert told[5] == "a?"  # half a character cannot be tokenised, and cost the episode


def test_late_tries_are_worth_less_and_earlier_rewards_are_kept_by_turn() -> None:
    assert discounted([0.0, 0.0, 1.0], 0.5) == (0.25, [])
    assert discounted([0.5, 1.0], 1.0) == (1.0, [0.5, 0.0])
    assert discounted([1.0, None], 0.5) == (None, [])
    assert (feedback_of({"feedback": "no", "reward": 1}).text, feedback_of(None).text) == ("no", None)
    with pytest.raises(ValueError, match="hint"):
        feedback_of({"hint": "x"})
