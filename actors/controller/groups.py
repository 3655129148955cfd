"""A group: all samples of one prompt, from admission to its end."""

from __future__ import annotations

import dataclasses

from schemas import Scored, Segments
from schemas.trajectory import model_segments

EQUAL_REWARDS = 1e-6  # equal rewards that are no binary fractions differ by rounding


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A scored sample, as far as the controller cares.

    `segments` are the `(version, count)` runs of what the model made; beside that the response holds `observed` tokens
    that it was told.
    """

    rollout_seq: int
    reward: float
    segments: Segments
    prompt_length: int = 0  # tokens
    scored_s: float = 0.0  # when the verdict was stored, Unix seconds by the broker's clock
    process_seq: int = 0  # where the verdict is, if it has process rewards, which stay there; else 0
    process_earned: bool = False  # whether one of them is not 0
    observed: int = 0
    length: int = dataclasses.field(init=False)  # tokens that the model made
    oldest: int | None = dataclasses.field(init=False)  # policy version among its tokens; None without tokens
    newest: int | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        versions = [version for version, _ in self.segments]
        object.__setattr__(self, "length", sum(count for _, count in self.segments))
        object.__setattr__(self, "oldest", min(versions, default=None))
        object.__setattr__(self, "newest", max(versions, default=None))


@dataclasses.dataclass(slots=True)
class Group:
    """A live group. `answers` and `lost` (dropped samples) are by index; together they fill up to `size`.

    `min_version` is the promise of its prompts: no token of it comes from an older version. The `first_*_seq` are where
    the log first speaks of it, so that a successor knows from where to fold.

    `aged`: a sample of it was dropped for its age. Either all of it is too old, which the next batch will find again,
    or another controller has formed a batch that left the sample out and trains the rest. So nothing else may end it.
    """

    group_id: int
    size: int
    min_version: int
    first_prompt_seq: int
    prompted: set[int] = dataclasses.field(default_factory=set)
    answers: dict[int, Answer] = dataclasses.field(default_factory=dict)
    lost: set[int] = dataclasses.field(default_factory=set)
    first_scored_seq: int | None = None
    first_dropped_seq: int | None = None
    aged: bool = False

    @property
    def complete(self) -> bool:
        """Whether each of its samples is scored or dropped."""
        return len(self.answers) + len(self.lost) == self.size

    @property
    def fewest(self) -> int:
        """How many answers it needs to be worth training: two, since advantages compare; one if it never had more."""
        return min(2, self.size)

    @property
    def zero_variance(self) -> bool:
        """Whether all its rewards are equal and nothing was earned on the way: then it teaches nothing."""
        rewards = [answer.reward for answer in self.answers.values()]
        if any(answer.process_earned for answer in self.answers.values()):
            return False
        return bool(rewards) and max(rewards) - min(rewards) < EQUAL_REWARDS

    def deadline(self, max_staleness: int) -> int:
        """The last step at which no token of it is too old: oldest version + η.

        For samples still on their way the promise `min_version` stands in for the versions that they will have.
        """
        oldest = [answer.oldest for answer in self.answers.values() if answer.oldest is not None]
        if not self.complete:
            oldest.append(self.min_version)
        return min(oldest, default=self.min_version) + max_staleness

    def stale_at(self, step: int, max_staleness: int, whole_sample: bool) -> list[int]:
        """Indices of answers that step `step` must leave out.

        With `whole_sample` one token older than η is enough, otherwise all its tokens must be (the rest is masked).
        """
        out = []
        for index, answer in self.answers.items():
            version = answer.oldest if whole_sample else answer.newest
            if version is not None and step - version > max_staleness:
                out.append(index)
        return sorted(out)


def answer_of(scored: Scored, seq: int = 0, stored_s: float = 0.0) -> Answer | None:
    """The answer in a verdict that was stored at `seq`, at Unix second `stored_s`; None if it is no score."""
    if scored.reward is None:
        return None
    return Answer(
        scored.rollout_seq,
        scored.reward,
        model_segments(scored.segments, scored.observations),
        scored.prompt_length,
        stored_s,
        process_seq=seq if len(scored.token_rewards) else 0,
        process_earned=bool(scored.token_rewards.any()),
        observed=scored.length - scored.made,
    )
