"""The built-in reward functions: `exact`, `numeric`, `math_verify`. Each compares the reply with `task["answer"]`.

An answer that a function cannot use is a fault of the data: it raises, and the verdict is an error, not a 0.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from schemas.errors import UserError

RewardFunction = Callable[..., Any]

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER_OR_FRACTION = re.compile(
    # a '-' after a word or a number is a minus between two terms, not a sign: "5-3" ends with 3
    rf"(?P<sign>(?<![\w.)\]}}])[-+−])?(?<![\w.])(?P<number>{_NUMBER})(?P<exponent>[eE][-+]?\d{{1,3}}(?!\d))?"
    rf"(?:\s?/\s?(?P<denominator>{_NUMBER}))?"
)
_TOLERANCE = Decimal("1e-6")


def exact(response: str, task: Mapping[str, Any]) -> float:
    """1.0 if the reply is the answer, but for white space at its ends; else 0.0."""
    return float(response.strip() == str(_answer(task)).strip())


def numeric(response: str, task: Mapping[str, Any]) -> float:
    """1.0 if the last number in the reply equals the answer; else 0.0, also if there is no number.

    Reads `1,234`, `-3.5`, `.5`, `1e-3` and fractions `3/4`; signs such as $ and % around a number are ignored. An
    answer that is a whole number must be met exactly (`12` and `12.0` are equal); any other within a relative 1e-6.
    """
    answer = str(_answer(task))
    expected, found = _last_number(answer), _last_number(response)
    if expected is None:
        raise ValueError(f"the answer {answer[:40]!r} is no number")
    if found is None:
        return 0.0
    if expected == expected.to_integral_value():
        return float(found == expected)
    return float(abs(found - expected) <= _TOLERANCE * abs(expected))


def load_math_verify() -> RewardFunction:
    """The `math_verify` function. Raises `UserError` if the package is not installed."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UserError(
            "The reward function 'math_verify' needs the package math-verify, which is not installed.",
            "Run: pip install 'rollstream[math]'.",
        ) from error
    from logging import getLogger

    getLogger("math_verify").setLevel("ERROR")  # it warns that its timeouts are off; the pool has its own

    def math_verify(response: str, task: Mapping[str, Any]) -> float:
        """1.0 if the reply's final expression is mathematically equal to the answer (LaTeX or plain); else 0.0.

        The package's own timeouts are off, since it counts what it gave up on as wrong: the pool's timeout applies.
        """
        answer = str(_answer(task))
        expected = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
        if not expected:
            raise ValueError(f"math-verify cannot read the answer {answer[:40]!r}")
        return float(verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None))

    return math_verify


BUILTINS: dict[str, Callable[[], RewardFunction]] = {
    "exact": lambda: exact,
    "numeric": lambda: numeric,
    "math_verify": load_math_verify,
}
"""By name, what makes the function ready: importing what it needs may fail with a `UserError`."""


def _answer(task: Mapping[str, Any]) -> Any:
    answer = task.get("answer")
    if answer is None:
        raise ValueError("the data row has no 'answer' to compare with")
    return answer


def _last_number(text: str) -> Decimal | None:
    """The last number in `text`; a fraction counts as one, and one with denominator 0 as none."""
    match = None
    for match in _NUMBER_OR_FRACTION.finditer(text):  # noqa: B007  # the last one is wanted
        pass
    if match is None:
        return None
    value = Decimal(match["number"].replace(",", "") + (match["exponent"] or ""))
    if match["denominator"]:
        denominator = Decimal(match["denominator"].replace(",", ""))
        if denominator == 0:
            return None
        value /= denominator
    return value.copy_negate() if match["sign"] in ("-", "−") else value  # unary minus would round
