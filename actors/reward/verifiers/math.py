"""`math_verify`: the reply's final expression is mathematically equal to the answer, by the package math-verify."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.reward.verifiers import RewardFunction, Setting
from actors.reward.verifiers.extract import AnswerOptions
from schemas.errors import UserError


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
        expected = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
        if not expected:
            raise ValueError(f"math-verify cannot read the answer {answer[:40]!r}")
        if reply is None:
            return 0.0
        found = parse(reply, parsing_timeout=None)
        if not found and options.extract != "whole":  # what stood in a box has lost what marked it as LaTeX
            found = parse(f"${reply}$", parsing_timeout=None)
        return float(
            verify(expected, found, float_rounding=options.decimals, strict=options.strict, timeout_seconds=None)
        )

    return math_verify
