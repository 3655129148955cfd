"""What counts as the expected output: a comparison that is too kind is found by the model, one too strict by nobody."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.reward.compare import same_output, same_value

# ruff: noqa: E501  # tables
TOLERANCE = 1e-6
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", 5), ("-5", -5), ("5.0", 5.0), ("5", 5.0), ("0.30000000000000004", 0.3), ("1e3", 1000.0), ('"a"', "a"),
        ("null", None), ("true", True), ("[1, [2]]", [1, [2]]), ("[1, 2]", (1, 2)), ('{"b": 1, "a": 2}', {"a": 2, "b": 1}),
        ('{"1": 2}', {1: 2}), (' [ ] ', []), ("-0.0", 0.0), (str(10**300), 10**300),
        (str(2**9000), 2**9000),
    ],
)  # fmt: skip
def test_equal_values_are_equal(text: str, expected: Any) -> None:
    assert same_value(text, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None), ("", ""), ("", None), ("5.0", 5), ("true", 1), ("1", True), ("false", 0), ("0", False), ('"5"', 5),
        ("5", "5"), ("null", 0), ("null", False), ("[]", None), ("[]", {}), ("NaN", float("nan")), ("NaN", 1.0),
        ("Infinity", float("inf")), ("1e999", float("inf")), ("1e999", 1e308), ("-Infinity", -1e308), ("[1]", 1), ("1", [1]),
        ("[1, 2]", [2, 1]), ("[1]", [1, 1]), ('{"a": 1}', {"a": 1, "b": 2}), ('{"a": 2, "a": 1}', {"a": 1}), ("5 5", 5),
        ("5,", 5), ("05", 5), ("+5", 5), ("0x5", 5), ("5_0", 50), ("'a'", "a"), ("5 # yes", 5), ("\ufeff5", 5),
        ("[" * 100_000, []), ("[" * 5000 + "]" * 5000, []), ("9" * 5000, 1), ("1", object()), ('"x"', b"x"), ("0.31", 0.3),
        ('"\\ud800"', "?"), ("True", True), ("1.0", True), ("1", 1.1),
    ],
)  # fmt: skip
def test_whatever_is_not_plainly_equal_is_not(text: str | None, expected: Any) -> None:
    """Types count, and nothing but one JSON value is read."""
    assert not same_value(text, expected, TOLERANCE)


@pytest.mark.parametrize(
    "word", ["1" * 1_000_000 + "x", "." * 1_000_000, "1." * 500_000, "1e" * 500_000, " " * 1_000_000 + "x"]
)
@pytest.mark.parametrize("expected", ["5", "5.5", "5.5 x"])
def test_no_word_takes_long_to_read(word: str, expected: str) -> None:
    """A pattern that tried all its ways through a million digits held the reward process until it was killed."""
    began = time.process_time()
    assert not same_output(word, expected, TOLERANCE)
    assert time.process_time() - began < 2


def test_what_is_too_deep_is_not_equal_to_itself() -> None:
    value: Any = 1
    for _ in range(200):
        value = [value]
    assert not same_value(json.dumps(value), value)


@given(VALUES, VALUES)
def test_without_tolerance_it_is_equality_of_canonical_json(a: Any, b: Any) -> None:
    """The naive twin, but for a whole number where a fraction is expected, which is drawn apart."""

    def canonical(value: Any) -> Any:
        match value:
            case bool() | None | str():
                return value, type(value).__name__
            case float():
                return value + 0.0, "float"
            case int():
                return value, "int"
            case list():
                return [canonical(item) for item in value], "list"
            case _:
                return {key: canonical(item) for key, item in value.items()}, "dict"

    assert same_value(json.dumps(a), a)
    if canonical(a) != canonical(b) and "float" not in repr(canonical(b)):
        assert not same_value(json.dumps(a), b)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("5\n", "5"), ("5", "5\n"), ("5  \n\n\n", "5\n"), ("a b\nc", "a b\nc\n"), ("", ""), ("\n", ""), ("a\r\nb\r\n", "a\nb"),
        ("0.3333333", "0.33333333333"), ("x 1.0000001 y", "x 1.0 y"), ("1", "1.0"), ("2e0", "2.0"), ("-0.0", "0.0"),
    ],
)  # fmt: skip
def test_equal_outputs_are_equal(given: str, expected: str) -> None:
    assert same_output(given, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "5"), ("5\n5", "5"), ("5", "5\n5"), (" 5", "5"), ("a  b", "a b"), ("A", "a"), ("\n5", "5"), ("1.0", "1"),
        ("1.1", "1"), ("1.00001", "1.0"), ("nan", "1.0"), ("nan", "nan "+"x"), ("inf", "1.0"), ("1_0.0", "10.0"),
        ("1.0", "nan"), ("１.0", "1.0"), ("1" * 5000 + ".0", "1.0"), ("1e999", "1.0"), ("0x1.0", "1.0"), ("5\x00", "5"),
    ],
)  # fmt: skip
def test_other_outputs_are_not(given: str, expected: str) -> None:
    assert not same_output(given, expected, TOLERANCE)


def test_without_tolerance_words_are_compared_as_they_stand() -> None:
    assert not same_output("0.3333", "0.33330")
    assert not same_value("0.30000000000000004", 0.3)
