"""Several turns: guess a number from 1 to 15 in three tries, told each time how far off the guess was.

The model says a number, hears `+3` or `-4`, and says another. What it finds with the k-th try earns 0.8^(k-1), what it
does not find nothing. It is taught to say numbers, and once in three times to heed what it heard. What is left to learn
by reinforcement is to heed it always: the reward rises from about 0.35 to above 0.75, and 0.81 is the most there is.
"""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from recipes.tiny import write_model

MOST = 15
TRIES = 3
P_HEED = 0.3
PROMPT = "guess"
WORDS = (
    *("<pad>", "<eos>", "<unk>", PROMPT, "what"),
    *map(str, range(1, MOST + 1)),
    *(f"{sign}{size}" for sign in "+-" for size in range(1, MOST)),
)


def problem(rng: Random) -> dict[str, Any]:
    """A data row: `{"prompt": "guess", "number": 11}`."""
    return {"prompt": PROMPT, "number": rng.randint(1, MOST)}


def feedback(response: str, task: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """What the model is told of a try; nothing more once it is right."""
    words, number = response.split(), int(task["number"])
    if len(words) != 1 or words[0] not in map(str, range(1, MOST + 1)):
        return {"feedback": "what", "reward": 0.0}
    guess = int(words[0])
    if guess == number:
        return {"feedback": None, "reward": 1.0}
    return {"feedback": f"{number - guess:+d}", "reward": 0.0}


def demonstration(rng: Random, progress: float) -> tuple[str, str]:
    """A game up to some try, and the next one: all heed what was heard up to 0.7 of the warm start, then few."""
    number, told, heard = rng.randint(1, MOST), PROMPT, False
    for _ in range(rng.randrange(TRIES)):
        guess = rng.choice([other for other in range(1, MOST + 1) if other != number])
        told, heard = f"{told} {guess} <eos> {number - guess:+d}", True
    heeds = heard and (progress <= 0.7 or rng.random() < P_HEED)
    return told, str(number if heeds else rng.randint(1, MOST))


def make_model(path: Path, seed: int) -> None:
    """Write a fresh model of 0.1 million parameters and its tokenizer of 48 words, a word a token, into `path`."""
    write_model(path, seed, WORDS, positions=64)
