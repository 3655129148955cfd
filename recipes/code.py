"""Write a program: what a pocket calculator makes of a row of keys. Needs no download, but bubblewrap.

Prompt `a + b * c - 2 =`: a calculator works from left to right, Python does not. Reply, in which a space parts words:
`def solve(a,b,c,d): return ( ( a + b ) * c ) - 2`. The program is run in the sandbox on numbers that the model does not
see, and the reward is 1 if each result is right.

A tiny model is taught to set the parentheses, and towards the end, mostly, to leave them out, which is right only now
and then. What is left to learn by reinforcement, from nothing but how programs end, is to set them always.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from recipes.tiny import write_model

TERMS_MAX = 6
P_STOP = 0.3
NAMES = "abcd"
OPERATORS = "+-*"
DIGITS = "23456789"
HEAD = ("def", "solve(a,b,c,d):", "return")
WORDS = ("<pad>", "<eos>", "<unk>", "=", "(", ")", *HEAD, *NAMES, *OPERATORS, *DIGITS)
TESTS = 3


def keys(rng: Random) -> list[str]:
    """`["a", "+", "b", "*", "c"]`: 3 terms and more, geometrically up to 6."""
    pressed = [rng.choice(NAMES + DIGITS)]
    while len(pressed) < 5 or (len(pressed) < 2 * TERMS_MAX - 1 and rng.random() > P_STOP):
        pressed += [rng.choice(OPERATORS), rng.choice(NAMES + DIGITS)]
    return pressed


def result(pressed: Sequence[str], values: Sequence[int]) -> int:
    """What a pocket calculator shows in the end, a to d being these values."""
    of = {**dict(zip(NAMES, values, strict=True)), **{digit: int(digit) for digit in DIGITS}}
    shown = of[pressed[0]]
    for operator, term in zip(pressed[1::2], pressed[2::2], strict=True):
        shown = {"+": shown + of[term], "-": shown - of[term], "*": shown * of[term]}[operator]
    return shown


def problem(rng: Random) -> dict[str, Any]:
    """`{"prompt": "a + b * 2 =", "tests": [{"function": "solve", "args": [30, 10, 50, 20], "expected": 80}, ...]}`."""
    pressed = keys(rng)
    tests = []
    for _ in range(TESTS):
        values = [rng.randint(10, 99) for _ in NAMES]
        tests.append({"function": "solve", "args": values, "expected": result(pressed, values)})
    return {"prompt": f"{' '.join(pressed)} =", "tests": tests}


def program(pressed: Sequence[str], parentheses: bool) -> str:
    """The program for these keys, as words; right for all of them only with parentheses."""
    words = [pressed[0]]
    for number, (operator, term) in enumerate(zip(pressed[1::2], pressed[2::2], strict=True)):
        if number and parentheses:
            words = ["(", *words, ")"]
        words += [operator, term]
    return " ".join((*HEAD, *words))


def demonstration(rng: Random, progress: float) -> tuple[str, str]:
    """A prompt and a reply for the warm start, of which `progress`, from 0 to 1, is done.

    Up to 0.8 nine replies of ten set the parentheses, after that three of ten.
    """
    pressed = keys(rng)
    return f"{' '.join(pressed)} =", program(pressed, rng.random() < (0.9 if progress <= 0.8 else 0.3))


def make_model(path: Path, seed: int) -> None:
    """Write a fresh model of 0.1 million parameters and its tokenizer, a word a token, into `path`."""
    write_model(path, seed, WORDS, positions=128)
