"""The one table of streams, subjects, consumers and limits.

A run `r` has its streams as `RS_r_<stream>` and its subjects as `rs.r.<stream>[.<key>]`, so runs can share a server.
Only the launcher creates them (`Bus.setup`), before any actor starts; actors bind.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from schemas import (
    Answer,
    Batch,
    Control,
    Dropped,
    Evaluation,
    Message,
    Note,
    Partial,
    Prompt,
    Rollout,
    Scored,
    StepDone,
    Turn,
    UserError,
    WeightVersion,
)

RUN_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """One stream of the log. `keyed`: the subject ends in the message's key and the newest per key is what counts.

    `newest_only` keeps one message a key. `expires` lets single messages carry a time to live. Streams keep everything
    else until `bytes_max`, where they refuse (`discard: new`): a full stream is an error, never silent loss.
    """

    name: str
    bytes_max: int = 64 << 30
    keyed: bool = False
    newest_only: bool = False
    expires: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Consumer:
    """A durable queue on a stream, shared by all workers of a role.

    `ack_wait_s` is how long a silent worker keeps a message; workers report progress every third of it.
    """

    name: str
    stream: Stream
    ack_wait_s: float = 6.0
    ack_pending_max: int = 20_000


PROMPTS: Final = Stream("prompts")
PARTIALS: Final = Stream("partials", keyed=True, newest_only=True)
ROLLOUTS: Final = Stream("rollouts")
TURNS: Final = Stream("turns", keyed=True)
ANSWERS: Final = Stream("answers", keyed=True)
NOTES: Final = Stream("notes", keyed=True)
SCORED: Final = Stream("scored")
BATCHES: Final = Stream("batches")
WEIGHTS: Final = Stream("weights")
STEPS: Final = Stream("steps")
DROPPED: Final = Stream("dropped")
EVALUATIONS: Final = Stream("evaluations")
CONTROL: Final = Stream("control")
LEASES: Final = Stream("leases", keyed=True, newest_only=True, expires=True)
DEAD: Final = Stream("dead", keyed=True)

STREAMS: Final[tuple[Stream, ...]] = (
    PROMPTS, PARTIALS, TURNS, ANSWERS, NOTES, ROLLOUTS, SCORED, BATCHES, WEIGHTS, STEPS, DROPPED, EVALUATIONS, CONTROL,
    LEASES, DEAD,
)  # fmt: skip
STREAM_OF: Final[dict[type[Message], Stream]] = {
    Prompt: PROMPTS,
    Partial: PARTIALS,
    Turn: TURNS,
    Answer: ANSWERS,
    Note: NOTES,
    Rollout: ROLLOUTS,
    Scored: SCORED,
    Batch: BATCHES,
    WeightVersion: WEIGHTS,
    StepDone: STEPS,
    Dropped: DROPPED,
    Evaluation: EVALUATIONS,
    Control: CONTROL,
}

ROLLOUT_WORKERS: Final = Consumer("rollout", PROMPTS)  # in a run with episodes, the episode workers
TURN_WORKERS: Final = Consumer("turn", TURNS)
REWARD_WORKERS: Final = Consumer("reward", ROLLOUTS)
CONSUMERS: Final[tuple[Consumer, ...]] = (ROLLOUT_WORKERS, TURN_WORKERS, REWARD_WORKERS)

DELIVERIES_MAX: Final = 20  # a message that was given out so often and never finished is dead-lettered
DEDUPE_WINDOW_S: Final = 120.0  # the broker drops a repeated id within it; readers drop repeats for ever
PUBLISH_TIMEOUT_S: Final = 1.0  # one attempt; nats-py's 5 s would dominate recovery
PUBLISH_DEADLINE_S: Final = 120.0  # all attempts under one id; then the actor ends and is started again
PUBLISH_WINDOW_BYTES: Final = 32 << 20  # the server's ingest queue holds 128 MB a stream
PUBLISH_WINDOW_MESSAGES: Final = 256
LEASE_S: Final = 3.0
LEASE_MIN_S: Final = 1.0  # the server knows no shorter time to live
BEAT_EVERY_S: Final = 1.0


def check_run_name(run: str) -> str:
    """The run's name if it can be part of a subject. Raises `UserError`."""
    if not RUN_NAME.fullmatch(run):
        raise UserError(
            f"The run name {run!r} cannot be used on the bus.",
            "Use lower-case letters, digits and '-', at most 63, starting with a letter or digit.",
        )
    return run


def stream_name(run: str, stream: Stream) -> str:
    """The stream's name on the server: `RS_<run>_<stream>`."""
    return f"RS_{run}_{stream.name}"


def subject(run: str, stream: Stream, key: str = "") -> str:
    """The subject a message is published on: `rs.<run>.<stream>[.<key>]`."""
    return f"rs.{run}.{stream.name}.{key}" if stream.keyed else f"rs.{run}.{stream.name}"


def beats_subject(run: str) -> str:
    """Where heartbeats and gauges go, over core NATS; they are not part of the log."""
    return f"rs.{run}.beats"


def progress_subject(run: str, listener: str) -> str:
    """Where `listener` is told, over core NATS, of what is being made for it; not part of the log."""
    return f"rs.{run}.progress.{listener}"
