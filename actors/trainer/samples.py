"""What a trainer is fed. No torch here."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from schemas import Rollout, Scored
from schemas.trajectory import model_tokens, turn_ends
from schemas.turns import when_asked


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sample of a batch, as the learner takes it; P prompt tokens, T response tokens.

    Of a trajectory of several turns the response holds what the model was told between them, too: tokens of version −1.
    It may be cut up into several `sequences`, each of which goes through the model by itself.

    Raises ValueError if the response arrays differ in length, if the prompt or the response is empty, if a token is to
    be trained that no policy made, or if the reward is not finite.
    """

    sample_id: str
    group_id: int
    prompt_tokens: npt.NDArray[np.int32]  # [P]
    tokens: npt.NDArray[np.int32]  # [T]
    behaviour_logprobs: npt.NDArray[np.float32]  # [T], at the rollout's temperature
    loss_mask: npt.NDArray[np.bool_]  # [T], False = not trained: too old, a tool's token, ...
    reward: float
    finish: Literal["stop", "length"] = "stop"  # length: the answer was cut
    versions: npt.NDArray[np.int32] | None = None  # [T], the policy version of each token; −1: no policy made it
    token_rewards: npt.NDArray[np.float32] | None = None  # [T], beside `reward`; a step's reward at its last token
    step_ends: npt.NDArray[np.int32] | None = None  # [K], the last tokens of steps, ascending; None: of each token
    sequences: npt.NDArray[np.int32] | None = None  # [2K], pairs (prompt tokens, response tokens); None: one sequence
    asked: npt.NDArray[np.int32] | None = None  # see `turns_asked`; None: turns were asked in the order of their tokens

    def __post_init__(self) -> None:
        T = len(self.tokens)
        if len(self.behaviour_logprobs) != T or len(self.loss_mask) != T:
            raise ValueError(
                f"sample {self.sample_id}: {T} tokens, {len(self.behaviour_logprobs)} behaviour_logprobs and "
                f"{len(self.loss_mask)} loss_mask entries; all three must be of one length"
            )
        for name in ("versions", "token_rewards"):
            extra = getattr(self, name)
            if extra is not None and len(extra) != T:
                raise ValueError(f"sample {self.sample_id}: {T} tokens, but {len(extra)} {name}")
        if self.token_rewards is not None and not np.isfinite(self.token_rewards).all():
            raise ValueError(f"sample {self.sample_id}: token_rewards are not finite; drop it before training")
        if self.step_ends is not None and (self.token_rewards is None or not set(self.step_ends) <= set(range(T))):
            raise ValueError(f"sample {self.sample_id}: step_ends must be of its {T} tokens, and have token_rewards")
        if self.versions is not None and self.loss_mask[self.versions < 0].any():
            raise ValueError(f"sample {self.sample_id}: a token is to be trained that no policy made")
        if self.sequences is not None and self.sequences.reshape(-1, 2).sum(0).tolist() != [len(self.prompt_tokens), T]:
            raise ValueError(f"sample {self.sample_id}: sequences must cut up its prompt and its {T} tokens")
        if T == 0 or len(self.prompt_tokens) == 0:
            raise ValueError(f"sample {self.sample_id}: prompt and response must hold at least one token each")
        if not np.isfinite(self.reward):
            raise ValueError(f"sample {self.sample_id}: reward {self.reward} is not finite; drop it before training")

    @property
    def made(self) -> npt.NDArray[np.bool_]:
        """bool [T]: the response tokens that a policy made, stale ones too; those to be trained if nothing is told."""
        made: npt.NDArray[np.bool_] = self.loss_mask if self.versions is None else self.versions >= 0
        return made

    @property
    def generated(self) -> int:
        """Response tokens that a policy made; stale ones count, a tool's do not."""
        return int(self.made.sum())

    @property
    def turn_ends(self) -> npt.NDArray[np.int64]:
        """The last tokens of its turns, int64 [K], ascending."""
        none = np.zeros(0, np.int32)
        return turn_ends(self.made, none if self.sequences is None else self.sequences)

    @property
    def longest_turn(self) -> int:
        """Tokens of its longest turn: what was nearest to being cut."""
        counts = np.diff(np.cumsum(self.made)[self.turn_ends], prepend=0)
        return int(counts.max(initial=0))


def train_sample(
    rollout: Rollout,
    loss_mask: npt.NDArray[np.bool_],
    versions: npt.NDArray[Any],
    reward: float,
    scored: Scored | None = None,
) -> TrainSample:
    """A rollout with at least one token as a sample; `loss_mask` and `versions` are [T].

    Observations are never trained, whatever `loss_mask` says. `scored` is its verdict, if that has process rewards.
    """
    if len(rollout.observations):
        made = model_tokens(rollout.observations, len(rollout.tokens))
        loss_mask, versions = loss_mask & made, np.where(made, versions, -1)
    return TrainSample(
        sample_id=f"{rollout.group_id}-{rollout.index:06d}",  # sorts by index
        group_id=rollout.group_id,
        prompt_tokens=rollout.prompt_tokens,
        tokens=rollout.tokens,
        behaviour_logprobs=rollout.logprobs,
        loss_mask=loss_mask,
        reward=reward,
        finish=rollout.finish,
        versions=versions.astype(np.int32),
        token_rewards=None if scored is None else scored.token_rewards,
        step_ends=None if scored is None or not len(scored.step_ends) else scored.step_ends,
        sequences=rollout.sequences if len(rollout.sequences) else None,
        asked=turns_asked(rollout),
    )


def turns_asked(rollout: Rollout) -> npt.NDArray[np.int32] | None:
    """Pairs `(last token of a turn, its place in the order in which the turns were asked)`, int32 [2K], by token.

    None if that is the order of the tokens, as it is within a sequence, or if it cannot be told: the ids of the turns
    are not known, or two stand side by side with nothing between them, and no rewards say where one ends.
    """
    if not len(rollout.sequences):
        return None
    made = model_tokens(rollout.observations, len(rollout.tokens))
    ends = rollout.step_ends if len(rollout.step_ends) else turn_ends(made, rollout.sequences)
    when = [place for turn in rollout.turns if (place := when_asked(turn)) is not None]
    if not len(when) == len(rollout.turns) == len(ends) or when == sorted(when):
        return None
    places = np.empty(len(when), np.int32)
    places[sorted(range(len(when)), key=when.__getitem__)] = np.arange(len(when))
    return np.stack([ends.astype(np.int32), places], axis=1).reshape(-1)
