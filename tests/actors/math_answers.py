"""Replies and answers whose verdict is known from how they were made: the same number, set or term, or another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from random import Random
from typing import NamedTuple


class MathAnswer(NamedTuple):
    """A reply, the row's answer, and whether the reply is right."""

    response: str
    answer: str
    right: bool


def math_answers(count: int, seed: int = 0) -> list[MathAnswer]:
    """`count` of them, the same for the same seed, kinds in turn, about half of them right."""
    random = Random(seed)
    found: list[MathAnswer] = []
    kinds = _kinds(random)
    while len(found) < count:
        found.append(next(kinds))
    return found


def _kinds(random: Random) -> Iterator[MathAnswer]:
    makers: list[Callable[[Random, bool], tuple[str, str]]] = [
        _whole, _thousands, _fraction, _decimal, _percent, _root, _power, _interval, _set, _tuple, _term, _product,
        _equation, _pi, _junk,
    ]  # fmt: skip
    while True:
        for make in makers:
            right = random.random() < 0.5 and make is not _junk
            said, answer = make(random, right)
            yield MathAnswer(_around(random, said), answer, right)


def _around(random: Random, said: str) -> str:
    ways = ["\\boxed{{{}}}", "So the answer is $\\boxed{{{}}}$.", "We get $x$ first.\nThe final answer is ${}$."]
    return random.choice(ways).format(said)


def _other(random: Random, value: int) -> int:
    return value + random.choice([-3, -2, -1, 1, 2, 3])


def _whole(random: Random, right: bool) -> tuple[str, str]:
    value = random.randint(-500, 500)
    return str(value if right else _other(random, value)), str(value)


def _thousands(random: Random, right: bool) -> tuple[str, str]:
    value = random.randint(1000, 9_999_999)
    return f"{value if right else _other(random, value):,}", str(value)


def _fraction(random: Random, right: bool) -> tuple[str, str]:
    value = Fraction(random.randint(1, 40), random.randint(2, 30))
    k = random.randint(1, 4)
    top, bottom = (value.numerator * k, value.denominator * k) if right else (value.numerator + 1, value.denominator)
    way = random.choice(["\\frac{{{}}}{{{}}}", "\\dfrac{{{}}}{{{}}}", "{}/{}"])
    return way.format(top, bottom), f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _decimal(random: Random, right: bool) -> tuple[str, str]:
    eighths = random.randint(1, 799)
    value = Fraction(eighths if right else _other(random, eighths), 8)
    return str(float(value)), f"\\frac{{{eighths}}}{{8}}"


def _percent(random: Random, right: bool) -> tuple[str, str]:
    value = random.randint(2, 99)
    return f"{value if right else _other(random, value)}\\%", f"{value}\\%"


def _root(random: Random, right: bool) -> tuple[str, str]:
    outside, inside = random.randint(2, 9), random.choice([2, 3, 5, 6, 7, 10])
    if right:
        return f"\\sqrt{{{outside * outside * inside}}}", f"{outside}\\sqrt{{{inside}}}"
    return f"\\sqrt{{{outside * outside * inside + 1}}}", f"{outside}\\sqrt{{{inside}}}"


def _power(random: Random, right: bool) -> tuple[str, str]:
    base, exponent = random.randint(2, 5), random.randint(2, 6)
    return f"{base}^{{{exponent}}}", str(base**exponent + (0 if right else 1))


def _interval(random: Random, right: bool) -> tuple[str, str]:
    low = random.randint(-20, 20)
    high = low + random.randint(1, 20)
    ends = random.choice(["()", "[]", "[)", "(]"])
    answer = f"{ends[0]}{low},{high}{ends[1]}"
    return (f"{ends[0]}{low}, {high if right else high + 1}{ends[1]}", answer)


def _set(random: Random, right: bool) -> tuple[str, str]:
    items = random.sample(range(-30, 30), random.randint(2, 4))
    said = items[:]
    random.shuffle(said)
    if not right:
        said[0] = 77
    return "\\{{{}\\}}".format(", ".join(map(str, said))), "\\{{{}\\}}".format(", ".join(map(str, items)))


def _tuple(random: Random, right: bool) -> tuple[str, str]:
    items = random.sample(range(-30, 30), 3)
    said = items if right else items[::-1]
    return "({})".format(", ".join(map(str, said))), "({})".format(", ".join(map(str, items)))


def _term(random: Random, right: bool) -> tuple[str, str]:
    a, b = random.randint(1, 9), random.randint(1, 9)
    return f"x^2 + {a + b}x + {a * b + (0 if right else 1)}", f"(x+{a})(x+{b})"


def _product(random: Random, right: bool) -> tuple[str, str]:
    a, b = random.randint(2, 9), random.randint(2, 9)
    return f"{a} \\cdot {b}", str(a * b if right else a * b + 1)


def _equation(random: Random, right: bool) -> tuple[str, str]:
    value = random.randint(-50, 50)
    return f"x = {value if right else _other(random, value)}", str(value)


def _pi(random: Random, right: bool) -> tuple[str, str]:
    top, bottom = random.randint(1, 9), random.choice([2, 3, 4, 6])
    shared = math.gcd(top, bottom)
    said = f"\\frac{{{top}\\pi}}{{{bottom if right else bottom + 1}}}"
    return said, f"\\frac{{{top // shared}}}{{{bottom // shared}}}\\pi"


def _junk(random: Random, right: bool) -> tuple[str, str]:
    junk = [
        "",
        "}{",
        "\\frac{",
        "\\sqrt",
        "I do not know",
        "\\text{none}",
        "?!",
        "\\begin{pmatrix} 1",
        "$$",
        "\U0001f937",
    ]
    return random.choice(junk), str(random.randint(100, 999))
