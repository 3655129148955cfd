"""`math_verify`: the reply's final expression is mathematically equal to the answer, by the package math-verify."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.reward.verifiers import RewardFunction, Setting
from actors.reward.verifiers.extract import AnswerOptions
from schemas.errors import UserError

_WORD = re.compile(r"[A-Za-z]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AnswerOptions):
    """What goes to math-verify."""

    decimals: int = 6
    """Decimal places to which numbers must agree."""
    strict: bool = True
    """Whether variables must have the same names, and a set is no tuple."""

    def __post_init__(self) -> None:
        if not 0 <= self.decimals <= 50:
            raise ValueError(f"decimals is {self.decimals} => It must be from 0 to 50.")


def load(options: Options, setting: Setting) -> RewardFunction:
    """The function. Raises `UserError` if the package is not installed."""
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
        """1.0 if the reply's final expression is equal to the answer (LaTeX or plain); else 0.0.

        The package's own timeouts are off: they are alarms, which wait for C code to end, and it counts what it gave
        up on as wrong. `reward.timeout_s` applies, by a kill.
        """
        answer, reply = options.answer(task), options.reply(response)
        expected = next(filter(None, (parse(form, parsing_timeout=None) for form in forms(answer))), None)
        if not expected:
            raise ValueError(f"math-verify cannot read the answer {answer[:40]!r}")
        if reply is None:
            return 0.0
        readings = [reply] if options.extract == "whole" else forms(reply)
        found: Any = next(filter(None, (parse(form, parsing_timeout=None) for form in readings)), [])
        return float(
            verify(expected, found, float_rounding=options.decimals, strict=options.strict, timeout_seconds=None)
        )

    return math_verify


def forms(bare: str) -> list[str]:
    """The ways to read an expression that stands by itself, the likelier one first.

    Without a `$` around it math-verify takes LaTeX for plain text, and of `(1, 2)` the last number
    alone.
    """
    if any(mark in bare for mark in ("$", "\\boxed", "\\(", "\\[")):
        return [bare]
    plain = _WORD.search(bare) and "\\" not in bare
    return [bare, f"${bare}$"] if plain else [f"${bare}$", bare]
