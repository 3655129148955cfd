"""The default task: follow a running total. Needs no download and is learnt on a laptop in a few minutes.

Prompt `a 7 b +8 c -3 =`: letters name the terms, totals stay within 0 and 20. Reply: each step with its new total, then
the answer, `b +8 15 c -3 12 # 12`; or the bare answer, `# 12`. The reward is 1 if the answer is exact and the reply
ended by itself. Prompts have 2 terms and more, geometrically up to 24, so replies differ as much in length as those of
a language model that reasons.

A tiny model is taught the steps, and towards the end sloppy habits: mostly to answer without them, and to slip. What
is left to learn by reinforcement is to reason again, and with care: the reward rises from about 0.35 to above 0.95.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from recipes.tiny import write_model

TERMS_MAX = 24
TOTAL_MAX = 20
P_STOP = 0.15
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (
    *("<pad>", "<eos>", "<unk>", "=", "#"),
    *LETTERS,
    *map(str, range(TOTAL_MAX + 1)),
    *(f"{sign}{size}" for sign in "+-" for size in range(1, 10)),
)


def problem(rng: Random) -> dict[str, Any]:
    """A data row: `{"prompt": "a 7 b +8 c -3 =", "answer": "12", "start": 7, "moves": [8, -3]}`."""
    terms = 2
    while terms < TERMS_MAX and rng.random() > P_STOP:
        terms += 1
    start = total = rng.randint(1, 9)
    moves = []
    for _ in range(terms - 1):
        size = rng.randint(1, 9)
        move = rng.choice([move for move in (size, -size) if 0 <= total + move <= TOTAL_MAX])
        total += move
        moves.append(move)
    steps = "".join(f" {letter} {move:+d}" for letter, move in zip(LETTERS[1:], moves, strict=False))
    return {"prompt": f"a {start}{steps} =", "answer": str(total), "start": start, "moves": moves}


def reward(response: str, task: Mapping[str, Any], finish: str) -> float:
    """1.0 if what follows the first `#` is exactly the answer and the reply ended by itself; else 0.0."""
    _, mark, answer = response.partition("#")
    return float(bool(mark) and answer.strip() == task["answer"] and finish == "stop")


def process_reward(response: str, task: Mapping[str, Any], finish: str) -> dict[str, Any]:
    """The same reward for the answer, and on the way 1/n for each of the n totals that is right where it stands."""
    total, steps = task["start"], []
    words = list(re.finditer(r"\S+", response.partition("#")[0]))
    for move, said in zip(task["moves"], words[2::3], strict=False):  # letter, move, total
        total += move
        steps.append([said.end(), float(said[0] == str(total)) / len(task["moves"])])
    return {"reward": reward(response, task, finish), "steps": steps}


def demonstration(rng: Random, progress: float) -> tuple[str, str]:
    """A prompt and a reply for the warm start, of which `progress`, from 0 to 1, is done.

    Up to 0.8 nine replies of ten show all steps, and no slip. After that eight of ten are bare answers, and each step
    of the others slips with probability 0.05; the steps and the answer after it follow from the wrong total.
    """
    p_bare, p_slip = (0.1, 0.0) if progress <= 0.8 else (0.8, 0.05)
    task = problem(rng)
    if rng.random() < p_bare:
        return task["prompt"], f"# {task['answer']}"
    total, words = task["start"], []
    for letter, move in zip(LETTERS[1:], task["moves"], strict=False):
        total += move
        if rng.random() < p_slip:
            total += rng.choice((-2, -1, 1, 2))
        total = min(TOTAL_MAX, max(0, total))
        words.append(f"{letter} {move:+d} {total}")
    return task["prompt"], f"{' '.join(words)} # {total}"


def make_model(path: Path, seed: int) -> None:
    """Write a fresh model of 0.103 million parameters and its tokenizer of 70 words, a word a token, into `path`."""
    write_model(path, seed, WORDS, positions=256)
