"""Process rewards: what a reward function may return beside its reward, and on which tokens it falls.

Imported by the reward child, which must start fast: the standard library only.

```
{"reward": 1.0, "token_rewards": [0.0, 0.0, 0.5, ...]}    one for each of `tokens`
{"reward": 1.0, "steps": [[17, 0.5], [42, -0.1]]}         characters of `response` up to the step's end, its reward
```
The second needs no tokenizer in the function: a step's reward falls on the token that completes its last character.
"""

import math
import numbers
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from actors.reward.frames import STEPS_MAX, TOKENS_MAX

Step: TypeAlias = tuple[int, float]
Decode: TypeAlias = Callable[[Sequence[int]], str]

PROCESS_REWARDS = ("token_rewards", "steps")
"""Keys of a returned dict that are no parts of the reward."""


def read_number(what: str, value: Any) -> float:
    """A finite number of any kind, `what` it is being its name in the `ValueError` for anything else."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a scalar of numpy or torch
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{what} is {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, not a finite number")
    return number


def read_process_rewards(value: Any) -> tuple[bytes | None, list[Step]]:
    """Token rewards as little-endian float32, None if there are none, and steps, in what a function returned.

    Raises `ValueError` for what is neither, for both at once, and for what is not finite.
    """
    if not isinstance(value, Mapping) or not value.keys() & set(PROCESS_REWARDS):
        return None, []
    if all(name in value for name in PROCESS_REWARDS):
        raise ValueError("the returned dict has both 'token_rewards' and 'steps'; one of them is enough")
    if "steps" in value:
        return None, check_steps(_listed("steps", value["steps"], STEPS_MAX))
    given = _listed("token_rewards", value["token_rewards"], TOKENS_MAX)
    rewards = [read_number(f"token_rewards[{i}]", reward) for i, reward in enumerate(given)]
    try:
        return struct.pack(f"<{len(rewards)}f", *rewards), []
    except OverflowError:
        raise ValueError("token_rewards holds a number that is too large for float32") from None


def read_float32(packed: bytes) -> tuple[float, ...]:
    """The numbers in little-endian float32. Raises `ValueError` if they are not whole, or not all finite."""
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes of float32")
    found = struct.unpack(f"<{len(packed) // 4}f", packed)
    if not all(map(math.isfinite, found)):
        raise ValueError("a token's reward is not finite")
    return found


def _listed(name: str, value: Any, items_max: int) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value  # of numpy or torch
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name!r} is {type(value).__name__}, not a list")
    if len(value) > items_max:
        raise ValueError(f"{name!r} has {len(value)} items, more than {items_max}")
    return list(value)


def check_steps(given: Sequence[Any]) -> list[Step]:
    """Pairs of an end and a reward. Raises `ValueError` for anything else."""
    steps: list[Step] = []
    for i, pair in enumerate(given):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"steps[{i}] is no pair of a number of characters and a reward")
        try:
            end = operator.index(pair[0])
        except TypeError:
            raise ValueError(f"steps[{i}] ends at {type(pair[0]).__name__}, not at a number of characters") from None
        if end <= (steps[-1][0] if steps else 0):
            raise ValueError(f"steps[{i}] ends at character {end}; steps must end one after the other, from 1 on")
        reward = read_number(f"the reward of steps[{i}]", pair[1])
        if abs(reward) > 3e38:
            raise ValueError(f"the reward of steps[{i}] is too large for float32")
        steps.append((end, reward))
    return steps


def place(
    steps: Sequence[Step], tokens: Sequence[int], text: str, decode: Decode
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Rewards of all `tokens`, and which of them end a step, ascending.

    A step that ends after n characters of `text` falls on the first token with which the decoded tokens begin with
    these n characters. Steps that end in one token add up there.

    Raises `ValueError` if a step ends behind the text, or the tokens do not decode to it.
    """
    rewards = [0.0] * len(tokens)
    ends: list[int] = []
    low = 1
    for i, (end, _) in enumerate(steps):
        if end > len(text):
            raise ValueError(f"steps[{i}] ends at character {end} of a response of {len(text)}")
    if steps and decode(tokens) != text:
        raise ValueError("the response is not what its tokens decode to")
    for end, reward in steps:
        wanted, high = text[:end], len(tokens)
        while low < high:
            middle = (low + high) // 2
            if decode(tokens[:middle]).startswith(wanted):
                high = middle
            else:
                low = middle + 1
        rewards[low - 1] += reward
        if low - 1 not in ends[-1:]:
            ends.append(low - 1)
    return read_float32(struct.pack(f"<{len(rewards)}f", *rewards)), tuple(ends)
