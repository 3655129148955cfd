"""Several tries with feedback: the model answers, is told what is wrong, and answers again.

    r = discount^(k−1) · r_k,  k = the try with which it ends: what is found late is worth less

Rewards of the tries before it, which a feedback function may give, are earned by their turns, discounted alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.episode.policy import Policy
from actors.episode.trajectory import Trajectory
from actors.functions import load_function, place_of
from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from actors.reward.verdict import RewardRequest
from schemas import Prompt

FEEDBACK_CHARS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Options:
    """What `episode.options` may hold for `multi_turn`."""

    turns: int = 3
    """Tries, at most."""
    feedback: str | None = None
    """A function of the user's, `file.py:function`: see `MultiTurn`. Without one the reward function judges."""
    wrong: str = "That is not right. Try again."
    """What is said, without a feedback function, after an answer that earned less than `enough`."""
    enough: float = 1.0
    """The reward that ends it."""
    discount: float = 1.0
    """By which each further try lowers the reward."""
    timeout_s: float = 30.0
    """Of one call of the feedback function."""

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns is {self.turns} => Set it to 1 or more")
        if not 0.0 <= self.discount <= 1.0:
            raise ValueError(f"discount is {self.discount} => Set it from 0 to 1")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s} => Set it above 0")


@dataclass(frozen=True, slots=True)
class Feedback:
    """What is said of a try: `text` None ends the episode; `reward` None leaves it to the run's reward function."""

    text: str | None
    reward: float | None


class MultiTurn:
    """The episode.

    A feedback function is called as `feedback(response, task, turn)`, plain or async, with the answer's text, the data
    row and the number of the try from 0. It returns what the model is told, None to end, or
    `{"feedback": text or None, "reward": number}`.
    """

    replayable = True

    def __init__(self, options: Options, reward: RewardConfig, base: Path) -> None:
        self._options = options
        self._own: Callable[..., Any] | None = load_function(options.feedback, base) if options.feedback else None
        self.place = place_of(self._own) if self._own is not None else ""
        self._pool = RewardPool(reward, base) if self._own is None else None

    async def start(self) -> None:
        """Load the reward function, if it is to judge."""
        if self._pool is not None:
            await self._pool.start()

    async def close(self) -> None:
        """End its processes."""
        if self._pool is not None:
            await self._pool.close()

    async def run(self, prompt: Prompt, policy: Policy) -> Trajectory:
        """Try until it is right, or the tries are used."""
        options = self._options
        conversation = policy.chat()
        rewards: list[float | None] = []
        said: str | None = None
        for turn in range(options.turns):
            reply = await conversation.ask(said if said is not None else ())
            judged = await self._judge(prompt, reply.text, reply.finish, turn)
            rewards.append(judged.reward)
            said = judged.text
            if said is None:
                break
        return policy.trajectory(*discounted(rewards, options.discount))

    async def _judge(self, prompt: Prompt, response: str, finish: Any, turn: int) -> Feedback:
        if self._own is not None:
            return feedback_of(await called(self._own, self._options.timeout_s, response, dict(prompt.task), turn))
        assert self._pool is not None
        request = RewardRequest(prompt.sample_id, prompt.prompt, response, finish, prompt.task)
        verdict = await self._pool.score(request)
        if verdict.reward is None:
            raise RuntimeError(f"the reward function's verdict on try {turn + 1} is {verdict.status}: {verdict.detail}")
        return Feedback(None if verdict.reward >= self._options.enough else self._options.wrong, verdict.reward)


async def called(function: Callable[..., Any], timeout_s: float | None, *args: Any, **kwargs: Any) -> Any:
    """What a function of the user's returns; a plain one runs in a thread. Raises `RuntimeError` if it is too slow."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s) as deadline:
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            try:
                return await asyncio.to_thread(function, *args, **kwargs)
            except TimeoutError as error:  # its own
                raise RuntimeError(str(error)) from error
    assert deadline.expired()
    raise RuntimeError(f"{getattr(function, '__name__', 'it')} took longer than {timeout_s} s")


def feedback_of(value: Any) -> Feedback:
    """What a feedback function returned. Raises `TypeError`, `ValueError`."""
    reward = None
    if isinstance(value, Mapping):
        unknown = set(value) - {"feedback", "reward"}
        if unknown:
            raise ValueError(f"feedback returned {sorted(unknown)}; it may return feedback and reward")
        reward = None if value.get("reward") is None else float(value["reward"])
        value = value.get("feedback")
    if value is not None and not isinstance(value, str):
        raise TypeError(f"feedback must be text or None, not {type(value).__name__}")
    if value is not None and len(value) > FEEDBACK_CHARS_MAX:
        raise ValueError(f"feedback has {len(value)} characters; the limit is {FEEDBACK_CHARS_MAX}")
    return Feedback(value, reward)


def discounted(rewards: list[float | None], discount: float) -> tuple[float | None, list[float]]:
    """The episode's reward, and those of its turns if one before the last earned something.

    `discounted([0.0, 0.0, 1.0], 0.5) == (0.25, [])`, `discounted([0.5, 1.0], 1.0) == (1.0, [0.5, 0.0])`. Without a
    number for the last try the run's reward function is asked, and there is nothing to discount.
    """
    if not rewards or rewards[-1] is None:
        return None, []
    worth = [(reward or 0.0) * discount**turn for turn, reward in enumerate(rewards)]
    return worth[-1], [*worth[:-1], 0.0] if any(worth[:-1]) else []
