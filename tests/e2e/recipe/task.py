"""The reward of the end-to-end tests."""

import time
from collections.abc import Mapping
from typing import Any


def reward(response: str, task: Mapping[str, Any], finish: str) -> float:
    """The share of words that occur but once: it varies among the samples of a group."""
    words = response.split()
    return len(set(words)) / (len(words) + 1)


def slow_reward(response: str, task: Mapping[str, Any], finish: str) -> float:
    """The same, as slow as a test of code."""
    time.sleep(0.1)
    return reward(response, task, finish)
