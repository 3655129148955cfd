"""The episodes that come with Rollstream, and how a recipe names one or a function of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from actors.episode import multi_turn, tool
from actors.episode.config import EpisodeConfig
from actors.episode.policy import Policy
from actors.functions import load_function
from actors.reward.config import RewardConfig
from actors.reward.verifiers.options import near, read_options
from schemas import Prompt, UserError

SECTION = ("episode", "episode")  # in errors about options


class Episode(Protocol):
    """What happens between a prompt and its rollout.

    `replayable` is False if what it does besides asking the model must not be repeated with the answers that it had.
    """

    replayable: bool

    async def start(self) -> None:
        """Before the first prompt."""

    async def run(self, prompt: Prompt, policy: Policy) -> Any:
        """A `Trajectory`, a reward for all that was said, or None: then the run's reward function is asked."""

    async def close(self) -> None:
        """After the last one."""


class Function:
    """An async function as an episode; `function.replayable` is False where the user has set it so."""

    def __init__(self, function: Callable[..., Awaitable[Any]], options: dict[str, Any]) -> None:
        self.replayable = bool(getattr(function, "replayable", True))
        self._function = function
        self._options = options

    async def start(self) -> None:
        """Nothing to start."""

    async def run(self, prompt: Prompt, policy: Policy) -> Any:
        """What the function returns."""
        return await self._function(prompt, policy, **self._options)

    async def close(self) -> None:
        """Nothing to close."""


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
