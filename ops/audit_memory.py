"""What an auditor remembers of a group, a sample and a kept prefix."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Group:
    """An admitted group, as its first prompt tells it."""

    admitted_s: float
    min_version: int
    size: int


@dataclasses.dataclass(slots=True)
class GroupDrops:
    """The drops of a group."""

    samples: int = 0
    last_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """A sample as a batch lists it."""

    step: int
    rollout_seq: int
    reward: float
    scored_seq: int  # where its process rewards are, 0 without


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """The newest kept prefix of a sample; `digest` is over its tokens, logprobs and segments."""

    stored_s: float
    tokens: int
    digest: bytes
