"""Reads what a reward function returned: a number, or a map of numbers with a `reward`.

Imported by the reward child, which must start fast.
"""

from collections.abc import Mapping
from typing import Any

from actors.reward.steps import PROCESS_REWARDS, read_number

PARTS_MAX = 64


def read_reward(value: Any) -> tuple[float, dict[str, float]]:
    """The reward and its named parts in what a function returned: a number, or a dict of numbers with a `reward`.

    Process rewards in the dict are left out, see `steps`, and so is text under `detail`, which is for people. Raises
    `ValueError`, in words for the verdict's detail, for anything else, and for what is not finite.
    """
    if not isinstance(value, Mapping):
        return read_number("the reward", value), {}
    if "reward" not in value:
        raise ValueError(f"the returned dict has no 'reward', only {list(value)[:8]}")
    if len(value) > PARTS_MAX:
        raise ValueError(f"the returned dict has {len(value)} entries, more than {PARTS_MAX}")
    parts = {
        str(name)[:80]: read_number(f"the part {str(name)[:80]!r}", part)
        for name, part in value.items()
        if name not in PROCESS_REWARDS and not (name == "detail" and isinstance(part, str))
    }
    return parts.pop("reward"), parts
