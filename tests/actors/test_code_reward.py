"""The code reward's scores and verdicts, test by test, and rows that it cannot use."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actors.reward.child import answer
from actors.reward.code import Options, load, read_tests
from actors.reward.verifiers import Setting, check_options
from schemas import UserError

Score = Callable[..., dict[str, Any]]
TESTS = [{"stdin": str(number), "stdout": str(2 * number)} for number in range(9)]


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.fixture(scope="module")
def rewards() -> Iterator[dict[str, Score]]:
    made = {
        score: load(Options(score=score, test_time_s=2.0, memory_mb=200), Setting())  # type: ignore[arg-type]
        for score in ("all", "fraction", "weighted")
    }
    yield dict(made)
    for reward in made.values():
        reward.close()


def test_a_program_that_was_only_thought_of_is_none() -> None:
    """A reply that was cut while it thought may hold a block that it would have thrown away."""
    thought, said = fenced("print(2 * int(input()))"), fenced("print(1)")
    after = load(Options(after="</think>"), Setting())
    try:
        found = [after(reply, {"tests": TESTS})["reward"] for reply in (f"{said}</think>{thought}", thought)]
        assert after(thought, {"tests": TESTS})["no_program"] == 1.0
    finally:
        after.close()
    assert found == [1.0, 0.0]


def fenced(program: str) -> str:
    return f"Here:\n```python\n{program}\n```\n"


def test_all_or_nothing_stops_at_the_first_failure(rewards: dict[str, Score]) -> None:
    right = rewards["all"](fenced("print(2 * int(input()))"), {"tests": TESTS})
    wrong = rewards["all"](fenced("x = int(input())\nprint(2 * x if x < 7 else 0)"), {"tests": TESTS})
    assert (right["reward"], right["detail"]) == (1.0, "passed 9/9")
    assert (wrong["reward"], wrong["passed"], wrong["wrong"], wrong["detail"]) == (0.0, 7, 1, "passed 7/9, wrong")


def test_a_fraction_counts_every_test(rewards: dict[str, Score]) -> None:
    found = rewards["fraction"](
        fenced("x = int(input())\nassert x != 3\nprint(2 * x if x < 7 else 0)"), {"tests": TESTS}
    )
    assert (found["reward"], found["failed"], found["wrong"]) == (pytest.approx(6 / 9), 1, 2)
    assert found["detail"] == "passed 6/9, wrong, failed"


def test_weights_count_for_what_they_say(rewards: dict[str, Score]) -> None:
    tests = [{**TESTS[1], "weight": 3}, {**TESTS[2], "weight": 0.5}, TESTS[3]]
    found = rewards["weighted"](fenced("x = int(input())\nprint(2 * x if x < 2 else 0)"), {"tests": tests})
    assert found["reward"] == pytest.approx(3 / 4.5)


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        ("no program", "no_program"),
        (fenced("def f(:"), "compile_error"),
        (fenced("while True: pass"), "timeout"),
        (fenced("x = bytearray(1 << 40)"), "memory"),
        (fenced("import socket; socket.socket()"), "forbidden"),
        (fenced("while True: print('x' * 1000)"), "output"),
        (fenced("1 / 0"), "failed"),
        (fenced("import os; os.kill(os.getpid(), 9)"), "failed"),
        (fenced("pass"), "wrong"),
    ],
)
def test_each_way_to_fail_is_a_part_of_the_verdict(rewards: dict[str, Score], reply: str, part: str) -> None:
    """As the reward process sends it: numbers by name, and the sentence as the detail."""
    verdict = answer(rewards["all"], {"response": reply, "task": {"tests": TESTS[:1]}})
    assert (verdict["status"], verdict["reward"], verdict["detail"]) == ("scored", 0.0, f"passed 0/1, {part}")
    assert {name for name, count in verdict["parts"].items() if count} == {part, "tests"}


def test_time_for_all_tests_is_bounded_and_what_was_not_run_is_a_timeout() -> None:
    with contextlib.closing(load(Options(score="fraction", test_time_s=1.0, total_time_s=2.4), Setting())) as reward:
        found = reward(fenced("import time\nif int(input()): time.sleep(9)\nprint(0)"), {"tests": TESTS})
    assert (found["passed"], found["timeout"]) == (1, 8)


def test_tests_of_functions_and_of_programs_may_be_mixed(rewards: dict[str, Score]) -> None:
    tests = [{"function": "double", "args": [4], "expected": 8}, {"stdin": "", "stdout": "ready"}]
    assert rewards["all"](fenced("def double(x): return 2 * x\nprint('ready')"), {"tests": tests})["reward"] == 1.0


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (None, "no list of tests 'tests'"),
        ([], "no list of tests 'tests'"),
        ("[]", "no list of tests 'tests'"),
        ([1], r"tests\[0\] is int, not a map"),
        ([{}], r"tests\[0\] needs 'stdin' and 'stdout'"),
        ([{"stdin": 1, "stdout": "1"}], r"tests\[0\] needs 'stdin' and 'stdout'"),
        ([{"function": "f", "args": [1]}], r"tests\[0\] has no 'expected'"),
        ([{"function": "f()", "args": [], "expected": 1}], "not a function's name"),
        ([{"function": "f", "args": "1", "expected": 1}], "not a function's name with a list"),
        ([{"function": "f", "args": [b"1"], "expected": 1}], "no JSON"),
        ([{"function": "lambda", "args": [], "expected": 1}], "not a function's name"),
        ([{"function": "f", "expected": float("nan")}], r"what tests\[0\] expects is no value of JSON"),
        ([TESTS[0], {"function": "f", "expected": [float("inf")]}], r"what tests\[1\] expects is no value of JSON"),
        ([{"function": "f", "expected": {"a": b"x"}}], "no value of JSON"),
        ([{"function": "f", "expected": {1, 2}}], "no value of JSON"),
        ([{"function": "f", "expected": 10**5000}], "no value of JSON"),
        ([{"function": "f", "expected": nested(150)}], "no value of JSON"),
        ([{"function": "f", "expected": "x" * 1023}], r"what tests\[0\] expects has 1026 bytes, more than output_kb"),
        ([{"stdout": "x" * 1024}], r"what tests\[0\] expects has 1025 bytes, more than output_kb"),
        ([{"stdout": "\ud800"}], r"what tests\[0\] expects holds a lone surrogate"),
        ([{"stdout": "", "weight": 0}], "weight"),
        ([{"stdout": "", "weight": 1e308}] * 3, "weight"),
        ([{"stdout": "", "weight": 10**400}], "weight"),
        ([{"stdout": ""}] * 1001, "1001 tests, more than 1000"),
    ],
)
def test_rows_that_cannot_be_used_are_the_datas_fault(tests: Any, reason: str) -> None:
    """An error, never a 0 for the model."""
    with pytest.raises(ValueError, match=reason):
        read_tests(tests, "tests", 1024)


def test_what_can_be_given_can_be_expected() -> None:
    """To its last byte, and not only in the words of JSON."""
    values = [None, True, -0.0, 1e300, 5e-324, "\ud800", "→", (1, (2,)), {1: 2, "b": [{}]}, 10**4000, nested(90)]
    outputs = ["", "\n\n", " \n" * 2000, "x" * 1023 + "  \n", "ä" * 511]
    tests = [{"function": "f", "expected": value} for value in values]
    assert len(read_tests([*tests, *({"stdout": text} for text in outputs)], "tests", 4096)) == 16
    tests = [{"function": "f", "expected": "x" * 1021}, {"function": "f", "expected": [1]}]
    assert len(read_tests([*tests, *({"stdout": text} for text in outputs)], "tests", 1024)) == 7


def test_a_function_has_the_name_that_python_gives_it(rewards: dict[str, Score]) -> None:
    """Which writes letters in one way only: with the row's own the function was never found."""
    tests = [{"function": "\ufb01nd", "args": [1], "expected": 1}]
    assert rewards["all"](fenced("def \ufb01nd(x): return x"), {"tests": tests})["reward"] == 1.0
    assert rewards["all"](fenced("def find(x): return x"), {"tests": tests})["reward"] == 1.0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"score": "some"}, "all or fraction or weighted"),
        ({"memory_mb": 0}, "from 1 to 1048576"),
        ({"memory_mb": 10**14}, "from 1 to 1048576"),
        ({"processes": 10**25}, "from 1 to 4096"),
        ({"output_kb": 10**16}, "from 1 to 1048576"),
        ({"test_time_s": 1e-9}, "from 0.1 to 3600"),
        ({"test_time_s": float("nan")}, "from 0.1 to 3600"),
        ({"total_time_s": 0}, "more than 0"),
        ({"total_time_s": float("nan")}, "more than 0"),
        ({"tolerance": -1.0}, "0 or more"),
        ({"tests": "x"}, "tests_key"),
    ],
)
def test_options_are_checked_with_the_recipe(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        check_options("code", options)
    assert reason in caught.value.remedy


def test_a_total_time_beyond_the_processes_own_is_refused() -> None:
    """The process would be killed first, and its samples lost instead of scored."""
    with pytest.raises(UserError, match="total_time_s = 9 s") as caught:
        load(Options(total_time_s=9.0), Setting(timeout_s=10.0))
    assert "Raise reward.timeout_s to 12" in caught.value.remedy
