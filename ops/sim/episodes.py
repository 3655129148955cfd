"""An episode of several turns that is a pure function of what the model said, so that a checker can go its ways again.

What is asked next, and how it ends, follows from a digest of the answers so far: it goes on, with or without an
observation, begins another conversation, draws two answers, ends answers at a string, listens to their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

from actors.episode.policy import GivenUp, Policy
from actors.episode.trajectory import Trajectory
from ops.sim.fakes import FakeTokenizer, prompt_tokens_of
from ops.sim.world import Process
from schemas import Answer, Prompt

TURNS_MAX: Final = 5  # questions, if nothing ends it before
STOPS: Final = ("ab", "cd", "dd")
TEXT: Final = FakeTokenizer()
HEARD_S: Final = 20.0  # in which an answer on the log must have reached an episode that nothing disturbs


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What an episode asks: `tokens` are all that the model is given, `told` is what is new of it.

    `anew`: in a conversation of its own; `aside`: of which the conversation does not learn.
    """

    tokens: tuple[int, ...]
    told: str = ""
    n: int = 1
    most: int | None = None
    stop: tuple[str, ...] = ()
    listens: bool = False
    anew: bool = False
    aside: bool = False


Said: TypeAlias = Sequence[tuple[Question, Sequence[Answer]]]


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """How an episode ends: with a reward of its own, with None, that is by the reward function, or given up."""

    reward: float | None
    given_up: bool = False


def next_of(prompt: Prompt, said: Said) -> Question | End:
    """What an episode does when it was answered this so far."""
    if not said:
        return Question(prompt_tokens_of(prompt.prompt), anew=True)
    drawn = hashlib.blake2b(f"{prompt.seed}/{len(said)}".encode(), digest_size=4)
    for answer in said[-1][1]:
        drawn.update(answer.tokens.tobytes())
    way, end, what, _ = drawn.digest()
    if len(said) == TURNS_MAX or way < 40:
        return End(None if end % 2 else end % 4 / 3, given_up=end < 16)
    if way < 64:
        return Question(prompt_tokens_of(prompt.prompt), anew=True)
    asked, answers = next((asked, answers) for asked, answers in reversed(said) if not asked.aside)
    told = f" {what}" if what % 4 else ""
    return Question(
        (*asked.tokens, *answers[-1].tokens.tolist(), *TEXT.encode(told)),
        told,
        n=2 if way < 96 else 1,
        aside=way < 96,
        most=3 if 96 <= way < 128 else None,
        stop=STOPS[what % 3 :] if 112 <= way < 192 else (),
        listens=160 <= way < 224,
    )


class Watches(Protocol):
    """What the simulation knows of the log; `ops.sim.episode_checks.EpisodeChecker` is it."""

    def answered_s(self, prompt: Prompt, number: int, n: int) -> float | None:
        """When the `n` answers to a question had all been stored; None if they are not, or are of another attempt."""

    def told(self, prompt: Prompt, answer: Answer, tokens: dict[int, int]) -> None:
        """An episode was told of these tokens, by place, while the answer was made."""


class FakeEpisode:
    """`actors.episode.builtin.Episode`; it fails as the scenario says."""

    place = "the simulation"

    def __init__(self, process: Process, watches: Watches, replayable: bool) -> None:
        self.replayable = replayable
        self._process = process
        self._watches = watches

    async def start(self) -> None:
        """See `Episode.start`."""

    async def close(self) -> None:
        """See `Episode.close`."""

    async def run(self, prompt: Prompt, policy: Policy) -> Trajectory | float | None:
        """Ask, until it ends."""
        said: list[tuple[Question, Sequence[Answer]]] = []
        conversation = None
        while not isinstance(step := next_of(prompt, said), End):
            await self._tool()
            told: list[dict[int, int]] = [{} for _ in range(step.n)]
            if step.anew:
                conversation = policy.chat()
            assert conversation is not None

            def on_tokens(
                choice: int, start: int, tokens: tuple[int, ...], logprobs: tuple[float, ...], told: Any = told
            ) -> None:
                told[choice].update(enumerate(tokens, start))

            listener = on_tokens if step.listens else None
            with self._heard_in_time(prompt, len(said), step.n):
                if step.aside:
                    answers = await policy.generate(
                        step.tokens, max_new_tokens=step.most, stop=step.stop, n=step.n, on_tokens=listener
                    )
                else:
                    reply = await conversation.ask(
                        step.told or (), max_new_tokens=step.most, stop=step.stop, on_tokens=listener
                    )
                    answers = [reply.answer]
            for answer, tokens in zip(answers, told, strict=True):
                self._watches.told(prompt, answer, tokens)
            said.append((step, answers))
        await self._tool()
        if not self.replayable and policy.log.reused:
            self._process.world.violate("turns", f"{prompt.sample_id} cannot be repeated and got old answers")
        if policy.log.reused:
            self._process.world.count("an episode went on from answers in the log")
        if step.given_up:
            raise GivenUp("filtered", "the episode says so")
        if step.reward is None:
            return None
        return policy.trajectory(step.reward)

    async def _tool(self) -> None:
        """What happens between two questions."""
        world, dice = self._process.world, self._process.dice("tool")
        await asyncio.sleep(dice.expovariate(1 / world.scenario.reward_s))
        if world.fate(self._process, "episode_fails"):
            world.count("an episode failed")
            raise RuntimeError("the simulation says so")

    @contextlib.contextmanager
    def _heard_in_time(self, prompt: Prompt, number: int, n: int) -> Iterator[None]:
        """An answer that stands in the log is heard, unless something cut its way."""
        process, world = self._process, self._process.world
        asked_s = world.loop.time()
        try:
            yield
        finally:
            answered_s = self._watches.answered_s(prompt, number, n)
            if answered_s is not None and not process.dead and not process.stopped:
                disturbed_s = max(process.cut_until_s, world.server_down_until_s, process.went_on_s)
                late_s = world.loop.time() - max(asked_s, answered_s, disturbed_s)
                if late_s > HEARD_S:
                    what = f"the answer to question {number} of {prompt.sample_id} was not heard for {late_s:.0f} s"
                    world.violate("I8", what)
