"""`numeric`: the last number of the reply equals the answer."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any, Literal

from actors.reward.verifiers import RewardFunction, Setting
from actors.reward.verifiers.extract import AnswerOptions, last_match

_TOLERANCE = Decimal("1e-6")
_RAISED = re.compile(r"\s?(?:\^|\*\*)\s?(?:\{(-?\d{1,3})\}|(-?\d{1,3})(?!\d))")
_POWER_DIGITS_MAX = 400  # of whole powers, which are exact up to here
_UNIT = re.compile(r"\s?([A-Za-zµ°€£$²³][A-Za-z0-9µ°€£$²³/^]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AnswerOptions):
    """How close is close enough, and what stands around a number."""

    tolerance_relative: float | None = None
    tolerance_absolute: float | None = None
    """A number within either is right. Without both a whole answer must be met exactly, another one within a relative
    1e-6."""
    percent: Literal["ignore", "scale"] = "ignore"
    """`scale` reads 50% as 0.5; by default the sign is left out."""
    units: dict[str, float] = field(default_factory=dict)
    """Factors of the units that may follow a number, such as `{m: 1, km: 1000}`; any other word is left out."""
    decimal_comma: bool = False
    """`1.234,5` is read as 1234.5."""

    def __post_init__(self) -> None:
        for name in ("tolerance_relative", "tolerance_absolute"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value} => It must be a number from 0 on.")
        if any(not math.isfinite(factor) or factor == 0 for factor in self.units.values()):
            raise ValueError(f"units are {self.units} => Each needs a factor, and none is 0.")


def load(options: Options, setting: Setting) -> RewardFunction:
    """The function."""

    def numeric(response: str, task: Mapping[str, Any]) -> float:
        """1.0 if the last number in the reply equals the answer; else 0.0, also if there is no number.

        Reads `1,234`, `-3.5`, `.5`, `1e-3`, `2 x 10^3` and fractions `3/4`, `1 3/4`, `\\frac{3}{4}`; signs such as $
        and % around a number are ignored.
        """
        answer = options.answer(task)
        expected = last_number(answer, options)
        if expected is None:
            raise ValueError(f"the answer {answer[:40]!r} is no number")
        reply = options.reply(response)
        found = None if reply is None else last_number(reply, options)
        return float(found is not None and close(found, expected, options))

    return numeric


def close(found: Decimal, expected: Decimal, options: Options) -> bool:
    """Whether `found` is right."""
    absolute, relative = options.tolerance_absolute, options.tolerance_relative
    if absolute is None and relative is None:
        if expected == expected.to_integral_value():
            return found == expected
        return abs(found - expected) <= _TOLERANCE * abs(expected)
    return abs(found - expected) <= max(Decimal(str(absolute or 0)), Decimal(str(relative or 0)) * abs(expected))


def last_number(text: str, options: Options) -> Decimal | None:
    """The last number in `text`; a fraction counts as one, and one with denominator 0 as none."""
    if options.decimal_comma:
        text = text.translate({ord("."): ",", ord(","): "."})
    match = last_match(text)
    if match is None:
        return None
    value = Decimal(match["number"].replace(",", "") + (match["exponent"] or ""))
    if match["denominator"]:
        denominator = Decimal(match["denominator"].replace(",", ""))
        if denominator == 0:
            return None
        value /= denominator
    behind = match.string[match.end() : match.end() + 40]
    if (raised := _RAISED.match(behind)) and not match["denominator"]:
        try:
            with localcontext(prec=_POWER_DIGITS_MAX):
                value = value ** int(raised[1] or raised[2])
        except ArithmeticError:  # too large, or a division by 0
            return None
    if match["power"]:
        value = value.scaleb(int(match["power"].replace("−", "-")))
    if match["whole"]:
        value += Decimal(match["whole"])
    if match["sign"] and match["sign"][0] in "-−–":
        value = value.copy_negate()  # unary minus would round
    if options.percent == "scale" and re.match(r"\s?(?:\\?%|per ?cent\b)", behind):
        value /= 100
    unit = _UNIT.match(behind) if options.units else None
    return value * Decimal(str(options.units[unit[1]])) if unit and unit[1] in options.units else value
