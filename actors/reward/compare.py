"""Whether what a program gave is what was expected. All that it gave is hostile: whatever is not plainly equal is not.

Only text comes from the sandbox; values are parsed here, so that no object of the program's takes part in a comparison.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

DEPTH_MAX = 100
DIGITS_MAX = 4300  # of a whole number, as Python's own limit: the time to read one is quadratic
WORD_MAX = 1000
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?", re.ASCII)  # takes linear time
_SPACES = re.compile(r"(\s+)")
_FRACTIONAL = re.compile(r"[.eE]")
_NOTHING = object()


def same_output(given: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether two outputs are equal line by line, but for white space at the ends of lines and empty lines at the end.

    With a `tolerance`, words may differ where a number with a fraction is expected: by so much, relative to it or
    absolute, whichever is more.
    """
    got, wanted = _lines(given), _lines(expected)
    if len(got) != len(wanted):
        return False
    return all(a == b or (tolerance > 0 and _same_words(a, b, tolerance)) for a, b in zip(got, wanted, strict=True))


def same_value(text: str | None, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether `text` is strict JSON for the value `expected`.

    Types count: `true` is not 1, `1.0` is not 1, "1" is neither. Where a fraction is expected a whole number of the
    same value is equal, and a `tolerance` applies as in `same_output`. Keys of objects may come in any order, none of
    them twice. No NaN, no infinity, at most 100 levels deep.
    """
    if text is None:
        return False
    try:
        value = json.loads(
            text, parse_constant=_refuse, parse_int=_read_int, parse_float=_read_float, object_pairs_hook=_read_object
        )
        return _equal(value, _plain(expected), tolerance, DEPTH_MAX)
    except (ValueError, RecursionError, MemoryError, OverflowError):
        return False


def output_bytes(expected: str) -> int:
    """How much a program prints for this output, its last line ended. Raises `ValueError` for what none can print."""
    try:
        return sum(len(line.encode()) + 1 for line in _lines(expected))
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate") from None


def value_bytes(expected: Any) -> int:
    """How long the JSON of this value is. Raises `ValueError` for what no JSON is equal to, such as NaN or a set."""
    try:
        text = json.dumps(_plain(expected))
    except (TypeError, ValueError, RecursionError):
        text = ""
    if not same_value(text, expected):
        raise ValueError("is no value of JSON")
    return len(text)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_words(given: str, expected: str, tolerance: float) -> bool:
    got, wanted = _SPACES.split(given), _SPACES.split(expected)  # with the spaces between them
    return len(got) == len(wanted) and all(
        a == b or _close_words(a, b, tolerance) for a, b in zip(got, wanted, strict=True)
    )


def _close_words(given: str, expected: str, tolerance: float) -> bool:
    if len(given) > WORD_MAX or not _FRACTIONAL.search(expected):
        return False
    if not (_NUMBER.fullmatch(given) and _NUMBER.fullmatch(expected)):
        return False
    return _close(float(given), float(expected), tolerance)


def _close(given: float, expected: float, tolerance: float) -> bool:
    if not (math.isfinite(given) and math.isfinite(expected)):
        return False
    return given == expected or abs(given - expected) <= tolerance * max(1.0, abs(expected))


def _equal(given: Any, expected: Any, tolerance: float, depth: int) -> bool:
    if depth == 0:
        return False
    if type(expected) is float and type(given) in (int, float):
        return _close(float(given), expected, tolerance)
    if type(given) is not type(expected):
        return False
    if type(expected) is list:
        return len(given) == len(expected) and all(
            _equal(a, b, tolerance, depth - 1) for a, b in zip(given, expected, strict=True)
        )
    if type(expected) is dict:
        return given.keys() == expected.keys() and all(
            _equal(given[key], value, tolerance, depth - 1) for key, value in expected.items()
        )
    return bool(given == expected)


def _plain(expected: Any) -> Any:
    """The expected value as JSON would give it back: rows may hold tuples."""
    if isinstance(expected, Mapping):
        return {str(key): _plain(value) for key, value in expected.items()}
    if isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        return [_plain(value) for value in expected]
    if expected is None or type(expected) in (bool, int, float, str):
        return expected
    return _NOTHING  # nothing in JSON is equal to it


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _read_int(text: str) -> int:
    if len(text) > DIGITS_MAX:
        raise ValueError("a number of too many digits")
    return int(text)


def _read_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
