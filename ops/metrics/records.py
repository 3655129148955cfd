"""What a sink writes: one record for each step and each evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from bus.port import Entry
from bus.table import EVALUATIONS, STEPS, Stream
from schemas import Evaluation, MalformedMessage, StepDone

READ: tuple[Stream, ...] = (STEPS, EVALUATIONS)  # the streams that are told
Key: TypeAlias = tuple[str, str]  # a record's stream and its id within it


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One step or one evaluation. `at` is the step, or the version that was evaluated; the reward of step i is of
    answers of version i or a little older, so both go on one axis.

    `staleness[i]`: trained tokens that were i versions old; empty for an evaluation. `data` are its problems.
    """

    key: Key
    at: int
    time_s: float
    values: Mapping[str, float]
    staleness: tuple[int, ...] = ()
    data: str = ""

    @property
    def of_step(self) -> bool:
        """Whether it is a step's."""
        return self.key[0] == STEPS.name

    def fields(self, run: str) -> dict[str, Any]:
        """As one flat JSON object."""
        stream, name = self.key
        out: dict[str, Any] = {"stream": stream, "id": name, "run": run}
        out |= {"step": self.at, "version": self.at + 1} if self.of_step else {"version": self.at, "data": self.data}
        out |= {"time": self.time_s, **self.values}
        return out | ({"staleness": list(self.staleness)} if self.of_step else {})


class Sink(Protocol):
    """Where records go."""

    def has(self, record: Record) -> bool:
        """Whether it is in there already, from now or from an earlier writer."""

    def write(self, record: Record) -> None:
        """Write one, whole; it can be read when this returns. Raises `OSError`."""

    def close(self) -> None:
        """End."""


def record_of(entry: Entry) -> Record | None:
    """The record in an entry of one of the streams `READ`; None if it holds none."""
    try:
        message = entry.message()
    except MalformedMessage:
        return None
    key = entry.stream.name, message.id
    match message:
        case StepDone():
            staleness = tuple(int(count) for count in message.staleness)
            time_s = message.metrics.get("time", entry.time_s)
            return Record(key, message.step, time_s, message.metrics, staleness)
        case Evaluation():
            return Record(key, message.version, entry.time_s, _values(message), data=message.data)
    return None


def _values(message: Evaluation) -> dict[str, float]:
    values = {} if message.reward is None else {"eval/reward": message.reward}
    return values | {
        "eval/count": float(message.count),
        "eval/failed": float(message.count - message.verdicts.get("scored", 0)),
        "eval/response_length": message.response_length,
        "eval/finished_fraction": message.finished,
        "eval/seconds": message.seconds,
        **{f"eval/parts/{name}": value for name, value in message.parts.items()},
    }
