"""What an episode comes to: the turns that were said, put together token by token into one rollout.

A turn whose prompt goes on from all that an earlier one holds, token for token, continues it: what stands between the
two answers is what the model was told, an observation. Any other turn begins a sequence of its own. So nothing that the
model said is ever tokenised again, and no token is trained that it did not say.

    prompt (1, 2)       -> answer (5, 6)
    prompt (1, 2, 5, 6, 9, 9) -> answer (7,)       =>  prompt_tokens 1 2, tokens 5 6 9 9 7, observations (2, 2)
    prompt (1, 2, 8)    -> answer (4,)             =>  another sequence: prompt_tokens 1 2 8, tokens 4
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from schemas import Answer, Finish, Prompt, Rollout


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """An answer, and the tokens that it is the answer to."""

    prompt_tokens: tuple[int, ...]
    answer: Answer


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """The outcome of an episode.

    `turns` are trained, in the order in which they were said; those without tokens are left out. `text` is what the
    reward function is asked about, `messages` the conversation after the prompt. Without a `reward` the run's reward
    function is asked. `turn_rewards`, one for each turn, are earned beside `reward`, by the turn.
    """

    turns: Sequence[Said]
    text: str
    finish: Finish
    messages: Sequence[dict[str, Any]] = ()
    reward: float | None = None
    turn_rewards: Sequence[float] = ()


class EmptyTrajectory(ValueError):
    """The model said nothing that could be trained."""


class _Sequence:
    """One sequence as it grows."""

    def __init__(self, said: Said) -> None:
        self.prompt = said.prompt_tokens
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.segments: list[tuple[int, int]] = []
        self.observations: list[tuple[int, int]] = []
        self.turns: list[tuple[int, str, int]] = []  # place in the trajectory, turn id, one past its last token here

    def goes_on_in(self, said: Said) -> bool:
        """Whether the turn continues all that is here."""
        mine = len(self.prompt) + len(self.tokens)
        prompt = said.prompt_tokens
        return (
            len(prompt) >= mine
            and prompt[: len(self.prompt)] == self.prompt
            and list(prompt[len(self.prompt) : mine]) == self.tokens
        )

    def add(self, place: int, said: Said) -> None:
        """Append what was told since, and the answer."""
        told = said.prompt_tokens[len(self.prompt) + len(self.tokens) :]
        if told:
            self.observations.append((len(self.tokens), len(told)))
            self.tokens.extend(told)
            self.logprobs.extend([0.0] * len(told))
            self._tag(self.segments[-1][0], len(told))  # nobody trains it: the tag of what it stands behind
        self.tokens.extend(said.answer.tokens.tolist())
        self.logprobs.extend(said.answer.logprobs.tolist())
        for version, count in said.answer.segments:
            self._tag(version, count)
        self.turns.append((place, said.answer.turn, len(self.tokens)))

    def _tag(self, version: int, count: int) -> None:
        if self.segments and self.segments[-1][0] == version:
            count += self.segments.pop()[1]
        self.segments.append((version, count))


def sequences_of(turns: Sequence[Said], per_turn: bool) -> list[_Sequence]:
    """The sequences that the turns make, by their last turns: what was said last stands last. With `per_turn` each turn
    is one by itself."""
    out: list[_Sequence] = []
    for place, said in enumerate(turns):
        if not len(said.answer.tokens):
            continue
        going_on = [] if per_turn else [one for one in out if one.goes_on_in(said)]
        if going_on:
            sequence = max(going_on, key=lambda one: len(one.prompt) + len(one.tokens))
        else:
            sequence = _Sequence(said)
            out.append(sequence)
        sequence.add(place, said)
    return sorted(out, key=lambda one: one.turns[-1][0])


def rollout_of(
    prompt: Prompt,
    trajectory: Trajectory,
    *,
    per_turn: bool = False,
    worker: str = "",
    seconds: float = 0.0,
    resumed: int = 0,
) -> Rollout:
    """The rollout of a prompt's episode.

    Raises:
        EmptyTrajectory: no turn has a token.
        ValueError: its turn rewards are not one a turn, or come without a reward.
    """
    turns = trajectory.turns
    sequences = sequences_of(turns, per_turn)
    if not sequences:
        raise EmptyTrajectory("the model said nothing")
    rewards = list(trajectory.turn_rewards)
    if rewards and (len(rewards) != len(turns) or trajectory.reward is None):
        raise ValueError(f"{len(rewards)} turn rewards for {len(turns)} turns, and the reward {trajectory.reward}")
    tokens: list[int] = []
    logprobs: list[float] = []
    segments: list[tuple[int, int]] = []
    observations: list[int] = []
    ends: list[tuple[int, int]] = []  # last token, place in the trajectory
    for sequence in sequences:
        start = len(tokens)
        observations.extend(number for at, count in sequence.observations for number in (start + at, count))
        ends.extend((start + end - 1, place) for place, _, end in sequence.turns)
        tokens.extend(sequence.tokens)
        logprobs.extend(sequence.logprobs)
        segments.extend(sequence.segments)
    token_rewards = np.zeros(len(tokens) if rewards else 0, "<f4")
    for end, place in ends if rewards else ():
        token_rewards[end] = rewards[place]
    lengths = [number for one in sequences for number in (len(one.prompt), len(one.tokens))]
    return Rollout(
        group_id=prompt.group_id,
        index=prompt.index,
        group_size=prompt.group_size,
        prompt=prompt.prompt,
        task=prompt.task,
        prompt_tokens=np.array([token for one in sequences for token in one.prompt], "<i4"),
        tokens=np.array(tokens, "<i4"),
        logprobs=np.array(logprobs, "<f4"),
        segments=tuple(segments),
        finish=trajectory.finish,
        text=trajectory.text,
        worker=worker,
        seconds=seconds,
        resumed=resumed,
        observations=np.array(observations, "<i4"),
        sequences=np.array(lengths if len(sequences) > 1 else (), "<i4"),
        messages=list(trajectory.messages),
        turns=[turn for one in sequences for _, turn, _ in one.turns],
        reward=trajectory.reward,
        token_rewards=token_rewards,
        step_ends=np.array([end for end, _ in ends] if rewards else (), "<i4"),
    )
