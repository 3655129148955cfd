"""The episodes that come with Rollstream, and how a recipe names one or a function of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from actors.episode import multi_turn, tool
from actors.episode.config import EpisodeConfig
from actors.episode.policy import FailedElsewhere, Policy
from actors.episode.trajectory import Trajectory
from actors.functions import load_function, place_of
from actors.reward.config import RewardConfig
from actors.reward.steps import read_number
from actors.reward.verifiers.options import near, read_options
from schemas import Prompt, UserError

SECTION = ("episode", "episode")  # in errors about options
RETURNS = (
    "an episode returns its reward as a finite number, None to have the reward function asked, or "
    "policy.trajectory(reward=...)"
)
VALUE_CHARS_SHOWN = 80


class Episode(Protocol):
    """What happens between a prompt and its rollout.

    `replayable` is False if what it does besides asking the model must not be repeated with the answers that it had.
    `place` is where a person would look for what went wrong.
    """

    replayable: bool
    place: str

    async def start(self) -> None:
        """Before the first prompt."""

    async def run(self, prompt: Prompt, policy: Policy) -> Trajectory | float | None:
        """A trajectory, a reward for all that was said, or None: then the run's reward function is asked."""

    async def close(self) -> None:
        """After the last one."""


class Function:
    """An async function as an episode; `function.replayable` is False where the user has set it so."""

    def __init__(self, function: Callable[..., Awaitable[Any]], options: dict[str, Any]) -> None:
        self.replayable = bool(getattr(function, "replayable", True))
        self.place = place_of(function)
        self._function = function
        self._options = options

    async def start(self) -> None:
        """Nothing to start."""

    async def run(self, prompt: Prompt, policy: Policy) -> Trajectory | float | None:
        """What the function returns. Raises `FailedElsewhere` if that is nothing that an episode may return."""
        outcome = await self._function(prompt, policy, **self._options)
        if outcome is None or isinstance(outcome, Trajectory):
            return outcome
        try:
            return read_number("the reward", outcome)
        except ValueError:
            raise FailedElsewhere(f"{self.place} returned {_shown(outcome)}; {RETURNS}") from None

    async def close(self) -> None:
        """Nothing to close."""


def _shown(value: Any) -> str:
    """A value with its type, for an error: `{'reward': 1.0} (dict)`."""
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine that was not awaited"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of the user's own
        text = "a value"
    return f"{text[:VALUE_CHARS_SHOWN]}{' …' * (len(text) > VALUE_CHARS_SHOWN)} ({type(value).__name__})"


@dataclass(frozen=True, slots=True)
class NoOptions:
    """What `episode.options` may hold for `single`: nothing."""


async def single(prompt: Prompt, policy: Policy) -> None:
    """One question, one answer: what a run without episodes does, too."""
    await policy.chat().ask()


def load_episode(config: EpisodeConfig, reward: RewardConfig, base: Path) -> Episode:
    """The episode that a recipe names. Raises `UserError`."""
    match config.function:
        case "single":
            read_options(NoOptions, config.options, "single", *SECTION)
            return Function(single, {})
        case "multi_turn":
            tries = read_options(multi_turn.Options, config.options, "multi_turn", *SECTION)
            return multi_turn.MultiTurn(tries, reward, base)
        case "tool":
            return tool.ToolUse(read_options(tool.Options, config.options, "tool", *SECTION), base)
    function = load_function(config.function, base, builtins=("single", "multi_turn", "tool"))
    if not inspect.iscoroutinefunction(function):
        raise UserError(
            f"episode.function {config.function} is no async function.",
            "Write it as `async def episode(prompt, policy)`.",
        )
    _check_parameters(function, config)
    return Function(function, config.options)


def _check_parameters(function: Callable[..., Any], config: EpisodeConfig) -> None:
    """Raises `UserError` unless the function takes a prompt, a policy and the recipe's options."""
    signature = inspect.signature(function)
    try:
        signature.bind(None, None, **config.options)
    except TypeError as error:
        free = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][
            2:
        ]
        unknown = [name for name in config.options if name not in free]
        raise UserError(
            f"The function {config.function} cannot be called with a prompt, a policy and episode.options: {error}.",
            near(unknown[0], free) if unknown else "Write it as `async def episode(prompt, policy, option=...)`.",
        ) from error
