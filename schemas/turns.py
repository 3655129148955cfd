"""What an episode asks of the model and what it is answered, over the log.

Flow: episode worker -Turn-> rollout worker -Answer-> episode worker. A turn's id tells all that it asks for, so an
episode that runs again and asks the same finds its answer in the log.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from typing import Any, ClassVar, Literal

from schemas.base import Sample, covers, register, same_length
from schemas.errors import MalformedMessage
from schemas.fields import FloatArray, IntArray, Segments, array, data, integer, segments, string
from schemas.fields import choice as one_of
from schemas.fields import number as real
from schemas.ids import INDEX_MAX, oldest_and_newest, sample_id
from schemas.messages import Finish

DIGEST_CHARS = 16
STOPS_MAX = 64
STOP_CHARS_MAX = 1000
ID = re.compile(r"[^/]+/(\d+)-(\d+)-(\d+)/")


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Turn(Sample):
    """Episode worker → rollout workers: go on from `prompt_tokens`, on behalf of sample `(group_id, index)`.

    Example: `Turn(group_id=12, index=3, number=1, prompt_tokens=[1, 5, 6, 2, 9], seed=7, min_version=4)`.
    `number` counts what the episode asked before it, `choice` the answers to one question, `attempt` how often the
    episode was begun anew with what cannot be repeated. `prompt_tokens` int32[P]. At most `max_new_tokens` are made,
    0: as many as the recipe allows. The first of the strings `stop` that the answer's text holds ends it. `listener`
    wants to be told of the tokens while they are made; empty: nobody does. No token comes from a version below
    `min_version`. `context` is what the episode needs beside the answer to go on from here in another life; it is no
    part of what is asked.
    """

    TYPE: ClassVar[str] = "turn"
    attempt: int = integer(0, INDEX_MAX, 0)
    number: int = integer(0, INDEX_MAX)
    choice: int = integer(0, INDEX_MAX, 0)
    prompt_tokens: IntArray = array("<i4")
    max_new_tokens: int = integer(default=0)
    stop: list[str] = data(())
    seed: int = integer()
    min_version: int = integer()
    listener: str = string(200, "")
    context: dict[str, Any] | None = data(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.stop, list) or len(self.stop) > STOPS_MAX or not all(map(_is_stop, self.stop)):
            raise MalformedMessage(f"turn.stop must be at most {STOPS_MAX} strings of 1 to {STOP_CHARS_MAX} characters")
        if not isinstance(self.context, dict | None):
            raise MalformedMessage("turn.context must be a map")

    @property
    def place(self) -> str:
        """Where in the episode it stands: two turns of one place ask something else, the episode went another way."""
        return f"{self.sample_id}/{self.attempt}-{self.number}-{self.choice}"

    @functools.cached_property
    def id(self) -> str:
        """Its place and a digest of what it asks for; computed once, since prompts are long."""
        asked = hashlib.sha256(self.prompt_tokens.tobytes())
        asked.update(repr((self.max_new_tokens, self.stop, self.seed)).encode())
        return f"{self.place}/{asked.hexdigest()[:DIGEST_CHARS]}"

    @property
    def versions(self) -> tuple[int, int] | None:
        """The version asked for."""
        return self.min_version, self.min_version


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Answer(Sample):
    """Rollout worker → episode workers: what the model said to the turn with the id `turn`.

    `tokens` int32[T], `logprobs` float32[T], `segments`, `finish`, `text`, `worker`, `seconds`, `resumed`, `stopped`
    and `saved` as in `Rollout`. An answer that a string ended has finish `stop`, the string in `stopped`, and its
    tokens go to the one that completes it; its text ends before it. With an `error` nothing could be generated, such as
    from a prompt that leaves the model no room, and there are no tokens.
    """

    TYPE: ClassVar[str] = "answer"
    turn: str = string(200)
    tokens: IntArray = array("<i4")
    logprobs: FloatArray = array("<f4")
    segments: Segments = segments()
    finish: Finish = one_of("stop", "length")
    text: str = string()
    worker: str = string(200, "")
    seconds: float = real(0.0)
    resumed: int = integer(default=0)
    stopped: str = string(STOP_CHARS_MAX, "")
    saved: int = integer(default=0)
    error: str = string(4000, "")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.turn.startswith(f"{sample_id(self.group_id, self.index)}/"):
            raise MalformedMessage(f"answer.turn must be one of the sample {self.sample_id}, not {self.turn[:60]!r}")
        same_length(self.tokens, self.logprobs, "answer")
        covers(self.segments, len(self.tokens), "answer.segments")

    @property
    def id(self) -> str:
        """The turn's id: a turn has one answer."""
        return self.turn

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest version of its tokens."""
        return oldest_and_newest(self.segments)


def when_asked(turn: str) -> tuple[int, int, int] | None:
    """What orders the turns of an episode as they were asked, by their ids: `when_asked("12-3/0-4-1/ab") == (0, 4, 1)`,
    attempt, number and choice. None if that is no id of a turn."""
    place = ID.match(turn)
    return None if place is None else (int(place[1]), int(place[2]), int(place[3]))


@register
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Note(Sample):
    """Episode worker → its next life: what became of an episode, or an agent did in its session, that no turn tells.

    Example: `Note(group_id=12, index=3, number=1, kind="reward", value=0.5, turn=2, choice=0)`. `number` counts those
    of the sample. `taken`: the session was handed out. `reward`: `value` for the answer `choice` of the session's
    question `turn`, for the whole session if that is -1. `end`: it is over, with `value` as its reward if there is one;
    with a `detail` it is not to be trained. `died`: the episode, which is a function here, ended its worker's process;
    `detail` tells how.
    """

    TYPE: ClassVar[str] = "note"
    number: int = integer(0, INDEX_MAX)
    kind: Literal["taken", "reward", "end", "died"] = one_of("taken", "reward", "end", "died")
    value: float | None = real(None, optional=True)
    turn: int = integer(-1, INDEX_MAX, -1)
    choice: int = integer(0, INDEX_MAX, 0)
    detail: str = string(1000, "")

    @property
    def id(self) -> str:
        """Its place among those of the sample."""
        return f"{self.sample_id}/{self.number}"


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= STOP_CHARS_MAX
