"""A step's reward on the wrong token teaches the wrong lesson, and what a user returns may be anything."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from actors.reward.steps import place, read_float32, read_process_rewards
from actors.reward.verdict import RewardRequest, Verdict

BYTES = b"ab \xc3\xa9\xf0\x9f\x98\x80"  # a, b, blank, é in two tokens and an emoji in four


def decode(tokens: Sequence[int]) -> str:
    """A byte-level tokenizer's: a character that is not yet whole is shown as a replacement character."""
    return bytes(BYTES[token] for token in tokens).decode(errors="replace")


CHARACTERS = [[0], [1], [2], [3, 4], [5, 6, 7, 8]]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=12))
def test_a_steps_reward_falls_on_the_token_that_completes_it(characters: list[tuple[int, bool]]) -> None:
    tokens = [token for character, _ in characters for token in CHARACTERS[character]]
    last = np.cumsum([len(CHARACTERS[character]) for character, _ in characters]) - 1  # of each character
    ends = [i + 1 for i, (_, ended) in enumerate(characters) if ended]
    rewards, places = place([(end, float(end)) for end in ends], tokens, decode(tokens), decode)
    assert places == tuple(int(last[end - 1]) for end in ends)
    assert [rewards[at] for at in places] == [float(end) for end in ends]
    assert sum(rewards) == sum(ends)


def test_steps_that_end_in_one_token_add_up_there() -> None:
    words = ["one two ", "three"]
    told = place([(3, 0.25), (8, 0.5), (13, 1.0)], [0, 1], "one two three", lambda t: "".join(words[i] for i in t))
    assert told == ((0.75, 1.0), (0, 1))


def test_special_tokens_that_show_no_text_earn_nothing() -> None:
    words = ["", "one", "", " two", ""]
    rewards, ends = place([(3, 1.0), (7, 2.0)], range(5), "one two", lambda t: "".join(words[i] for i in t))
    assert (rewards, ends) == ((0.0, 1.0, 0.0, 2.0, 0.0), (1, 3))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"token_rewards": 3}, "'token_rewards' is int, not a list"),
        ({"token_rewards": [1.0, "2"]}, r"token_rewards\[1\] is str, not a number"),
        ({"token_rewards": [math.nan]}, r"token_rewards\[0\] is nan, not a finite number"),
        ({"token_rewards": [1e39]}, "too large for float32"),
        ({"token_rewards": [], "steps": []}, "both"),
        ({"steps": {"a": 1}}, "'steps' is dict, not a list"),
        ({"steps": [[1]]}, r"steps\[0\] is no pair"),
        ({"steps": [[1.5, 1.0]]}, r"steps\[0\] ends at float"),
        ({"steps": [[2, 1.0], [2, 1.0]]}, r"steps\[1\] ends at character 2"),
        ({"steps": [[0, 1.0]]}, r"steps\[0\] ends at character 0"),
        ({"steps": [[1, math.inf]]}, r"the reward of steps\[0\] is inf"),
        ({"steps": [[1, 1e39]]}, "too large for float32"),
        ({"steps": [[i + 1, 0.0] for i in range(5000)]}, "more than 4096"),
    ],
)
def test_what_is_no_process_reward_is_told_as_such(value: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_process_rewards(value)


def test_arrays_and_their_scalars_are_lists_and_numbers_too() -> None:
    packed, steps = read_process_rewards({"token_rewards": np.array([0.5, -1.0])})
    assert (packed, steps) == (struct.pack("<2f", 0.5, -1.0), [])
    assert read_process_rewards({"steps": [(np.int64(3), np.float32(0.5))]}) == (None, [(3, 0.5)])
    assert read_process_rewards({"reward": 1.0}) == read_process_rewards(1.0) == (None, [])
    with pytest.raises(ValueError, match="finite"):
        read_float32(struct.pack("<f", math.nan))


FUNCTION = """
def reward(task, tokens):
    if task["form"] == "tokens":
        return {"reward": 1, "form": 0.5, "token_rewards": [0.1] * (len(tokens) + task.get("more", 0))}
    return {"reward": 1, "steps": task["steps"]}
"""


async def test_the_pool_gives_verdicts_with_rewards_on_tokens(tmp_path: Path) -> None:
    """One that does not fit is invalid, and never a crash."""
    (tmp_path / "rewards.py").write_text(FUNCTION)
    config = RewardConfig(function="rewards.py:reward", children=1)

    def request(**task: Any) -> RewardRequest:
        return RewardRequest("1-0", "?", "ab é", "stop", task, [0, 1, 2, 3, 4])

    pool, without = RewardPool(config, tmp_path, lambda: decode), RewardPool(config, tmp_path)
    try:
        of_tokens = await pool.score(request(form="tokens"))
        assert of_tokens.token_rewards == tuple(np.full(5, 0.1, np.float32).tolist())
        assert (of_tokens.step_ends, of_tokens.parts) == ((), {"form": 0.5})
        of_steps = await pool.score(request(form="steps", steps=[[2, 0.5], [4, -1]]))
        assert (of_steps.token_rewards, of_steps.step_ends) == ((0.0, 0.5, 0.0, 0.0, -1.0), (1, 4))
        assert of_steps.steps == ()
        told = dataclasses.replace(
            request(form="steps", steps=[[2, 0.5], [4, -1]]), tokens=[9, 9, 0, 1, 2, 3, 4, 9], turn=(2, 7)
        )
        of_turn = await pool.score(told)
        assert (of_turn.token_rewards, of_turn.step_ends) == ((0.0, 0.0, 0.0, 0.5, 0.0, 0.0, -1.0, 0.0), (3, 6))
        for task, says in (
            ({"form": "tokens", "more": 1}, "6 numbers for 5 tokens"),
            ({"form": "steps", "steps": [[5, 1]]}, "ends at character 5 of a response of 4"),
            ({"form": "steps", "steps": "abc"}, "'steps' is str"),
        ):
            verdict = await pool.score(request(**task))
            assert (verdict.status, verdict.reward) == ("invalid", None)
            assert says in verdict.detail
        plain = await without.score(request(form="steps", steps=[[2, 0.5]]))
        assert plain == Verdict("scored", 1.0, seconds=plain.seconds, digest=plain.digest)
    finally:
        await pool.close()
        await without.close()
