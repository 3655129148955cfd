"""What an episode function sees of the model.

    async def episode(prompt, policy):
        conversation = policy.chat()
        reply = await conversation.ask()
        if not right(reply.text):
            await conversation.ask("Look again.")
        return policy.trajectory()

Interruptions, new weights, dead workers: nothing of that shows here. The temperature and the like are the recipe's,
since what is trained must be what was sampled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Protocol

import numpy as np

from actors.episode.config import EpisodeConfig
from actors.episode.conversation import Conversation, Tokenizer
from actors.episode.encoding import Encoding
from actors.episode.exchange import Answered, OnTokens
from actors.episode.trajectory import Said, Trajectory
from schemas import Answer, DropReason, Finish, Prompt, Turn

SEED_BITS = 62
CHOICES_MAX = 64  # answers to one turn


class Bound(Exception):
    """An episode has come to one of its bounds: it is cut, and what was said until then is its trajectory."""


class FailedElsewhere(Exception):
    """An episode failed in a process of its own; the text tells all that is to be told."""


class GivenUp(Exception):
    """An episode that shall not be trained: its sample is dropped with this reason."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: DropReason = reason


class Asks(Protocol):
    """Who answers turns: `actors.episode.exchange.Exchange` over the log, `actors.evaluator.episodes.EngineAnswers`."""

    async def ask(self, turn: Turn, on_tokens: OnTokens | None = None) -> Answered:
        """The answer to a turn; `on_tokens` is told of its tokens while they are made."""


@dataclasses.dataclass(slots=True)
class Log:
    """What the log had of an episode before it ran: `reused` turns, and the first turn that asked something else."""

    reused: int = 0
    diverged: int | None = None


class Policy:
    """The model, as one episode of one sample asks it. `max_new_tokens` is the recipe's bound of one answer."""

    def __init__(
        self,
        prompt: Prompt,
        exchange: Asks,
        tokenizer: Tokenizer,
        encoding: Encoding,
        config: EpisodeConfig,
        max_new_tokens: int,
        attempt: int = 0,
    ) -> None:
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.said: list[Said] = []
        self.asking = 0  # questions that the model has not answered
        self.conversations: list[Conversation] = []
        self.log = Log()
        self._encoding = encoding
        self._exchange = exchange
        self._config = config
        self._max_new_tokens = max_new_tokens
        self._attempt = attempt
        self._number = 0

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        n: int = 1,
        on_tokens: OnTokens | None = None,
        context: dict[str, Any] | None = None,
    ) -> list[Answer]:
        """`n` answers to these tokens, each drawn by itself; all of them belong to the episode.

        At most `max_new_tokens` tokens, and never more than the recipe allows. The first string of `stop` that the text
        holds ends an answer. `on_tokens` is told of the answers while they are made: see `Exchange.ask`. `context` is
        kept with the turns on the log.

        Raises:
            Bound: the episode has used its turns or its tokens, or the prompt leaves the model no room.
            ValueError: what was asked for cannot be asked for.
        """
        _check(prompt_tokens, max_new_tokens, n)
        number, self._number = self._number, self._number + 1
        if number >= self._config.max_turns:
            raise Bound(f"episode.max_turns {self._config.max_turns} are used")
        tokens = tuple(map(int, prompt_tokens))
        most = min(max_new_tokens or self._max_new_tokens, self._max_new_tokens)
        if self._config.max_tokens is not None:
            most = min(most, self._config.max_tokens - len(tokens))
            if most < 1:
                raise Bound(f"{len(tokens)} tokens of context use up episode.max_tokens {self._config.max_tokens}")
        turns = [
            Turn(
                group_id=self.prompt.group_id,
                index=self.prompt.index,
                attempt=self._attempt,
                number=number,
                choice=choice,
                prompt_tokens=np.array(tokens, "<i4"),
                max_new_tokens=most,
                stop=list(stop),
                seed=seed_of(self.prompt.seed, self._attempt, number, choice),
                min_version=self.prompt.min_version,
                context=context,
            )
            for choice in range(n)
        ]
        self.asking += 1
        answered = await asyncio.gather(*(self._exchange.ask(turn, on_tokens) for turn in turns))
        self.asking -= 1
        for one in answered:
            self.log.reused += one.reused
            if one.elsewhere and self.log.diverged is None:
                self.log.diverged = number
            if one.answer.error:
                raise Bound(one.answer.error)
        self.said.extend(Said(tokens, one.answer) for one in answered)
        return [one.answer for one in answered]

    def skip(self) -> None:
        """Leave out the number of a question that an earlier life was refused."""
        self._number += 1

    def chat(self, tools: Sequence[dict[str, Any]] = ()) -> Conversation:
        """A conversation that begins with the prompt. `tools` are told by the chat template, in OpenAI's format."""
        conversation = Conversation(self, self.tokenizer, self._encoding, self.prompt.prompt, tools)
        self.conversations.append(conversation)
        return conversation

    def trajectory(
        self, reward: float | None = None, turn_rewards: Sequence[float] = (), finish: Finish | None = None
    ) -> Trajectory:
        """All that was said so far. Without a reward the reward function is asked about the last answer's text."""
        last = self.said[-1].answer if self.said else None
        return Trajectory(
            turns=tuple(self.said),
            text=last.text if last is not None else "",
            finish=finish or (last.finish if last is not None else "length"),
            messages=self.conversations[-1].messages if self.conversations else (),
            reward=reward,
            turn_rewards=turn_rewards,
        )


def seed_of(seed: int, attempt: int, number: int, choice: int) -> int:
    """The seed of a turn: the sample's for its first, another for each other."""
    if (attempt, number, choice) == (0, 0, 0):
        return seed
    digest = hashlib.sha256(f"{seed}/{attempt}/{number}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS)


def _check(prompt_tokens: Sequence[int], max_new_tokens: int | None, n: int) -> None:
    if not all(isinstance(token, Integral) for token in prompt_tokens):
        raise ValueError("generate takes the ids of tokens, integers; for text there is policy.chat().ask(text)")
    if not 1 <= n <= CHOICES_MAX:
        raise ValueError(f"n must be 1 to {CHOICES_MAX} answers, not {n}")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 at least, not {max_new_tokens}")
