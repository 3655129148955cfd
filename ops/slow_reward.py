"""The running total's reward, as slow as running the tests of a piece of code. For `rollstream bench async`."""

import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from recipes.running_total import reward as quick

SHORTEST_S = 0.2
LONGEST_S = 2.0


def seconds(sample_id: str) -> float:
    """How long a sample's reward takes: uniform between the two, and the same in each run."""
    share = int.from_bytes(blake2b(sample_id.encode(), digest_size=8).digest(), "little") / 2**64
    return SHORTEST_S + (LONGEST_S - SHORTEST_S) * share


def reward(response: str, task: Mapping[str, Any], finish: str, sample_id: str) -> float:
    """The reward of `recipes.running_total`, after its time."""
    time.sleep(seconds(sample_id))
    return quick(response, task, finish)
