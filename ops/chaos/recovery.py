"""How long the run needed after a fault: a pure function of the faults and of what the log and the launcher tell.

The recovery of a fault lasts until the run makes progress again at what the process that was hit does:

- trainer: the next step is done; controller: the next prompt or batch; rollout and reward worker: the next rollout or
  verdict by the worker of that name; reward-child: the next verdict by its worker; nats: the next message of any
  stream; launcher and fork-server, with whom all actors end: the next step. Or the run has ended.
- After a kill, only what was stored after the successor was started counts, and in any case only what was stored
  `ON_THE_WAY_S` after the fault: it may have been on its way before.
- The clock starts at the kill, or at the SIGCONT of a stop. It starts again if the process is hit again before it made
  progress, and stands while another process is held by SIGSTOP.
- A fault is alone if all before it had healed when it struck, and none struck before it had healed.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

from ops.chaos.faults import Fault, Kind

ON_THE_WAY_S = 0.1
ALL: frozenset[Kind] = frozenset({"launcher", "fork-server"})  # with these, all actors end

STREAMS: dict[Kind, frozenset[str]] = {
    "trainer": frozenset({"steps"}),
    "controller": frozenset({"prompts", "batches"}),
    "rollout": frozenset({"rollouts"}),
    "reward": frozenset({"scored"}),
    "reward-child": frozenset({"scored"}),
    "launcher": frozenset({"steps"}),
    "fork-server": frozenset({"steps"}),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A message of the log: when the server stored it, in which stream, and which worker wrote it, if it says so."""

    time_s: float
    stream: str
    worker: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """The launcher started a process."""

    time_s: float
    process: str


@dataclasses.dataclass(frozen=True, slots=True)
class Recovery:
    """How long the run needed after a fault, in seconds, and whether no other fault was in the way."""

    fault: Fault
    seconds: float
    alone: bool


def recoveries(
    faults: Sequence[Fault], log: Iterable[Stored], starts: Iterable[Started], end_s: float
) -> list[Recovery]:
    """The recovery of each fault. `end_s` is when the run ended: then everything has recovered."""
    entries = sorted(log, key=lambda stored: stored.time_s)
    started = sorted(starts, key=lambda start: start.time_s)
    healed_s = [_healed_s(fault, entries, started, end_s) for fault in faults]
    return [
        Recovery(fault, _seconds(fault, healed, faults), _is_alone(fault, healed, zip(faults, healed_s, strict=True)))
        for fault, healed in zip(faults, healed_s, strict=True)
    ]


def _healed_s(fault: Fault, log: Sequence[Stored], starts: Sequence[Started], end_s: float) -> float:
    """When it had recovered, in Unix time."""
    since_s = fault.ended_s + ON_THE_WAY_S
    if not fault.stop and fault.kind not in ("nats", "reward-child"):
        waited_for = "trainer" if fault.kind in ALL else fault.victim
        began = (start.time_s for start in starts if start.time_s >= fault.at_s and start.process == waited_for)
        since_s = max(since_s, next(began, end_s))
    first = bisect.bisect_left(log, since_s, key=lambda stored: stored.time_s)
    progress = (stored.time_s for stored in log[first:] if _is_progress(stored, fault))
    return max(fault.ended_s, min(next(progress, end_s), end_s))


def _seconds(fault: Fault, healed_s: float, faults: Sequence[Fault]) -> float:
    again = [other.ended_s for other in faults if other.ended_s <= healed_s and _hits_again(other, fault)]
    begun_s = max([fault.ended_s, *again])
    held_until_s, seconds = begun_s, healed_s - begun_s
    for other in sorted((other for other in faults if other.stop), key=lambda other: other.at_s):
        from_s, to_s = max(other.at_s, held_until_s), min(other.ended_s, healed_s)
        if other is not fault and to_s > from_s:
            seconds -= to_s - from_s
            held_until_s = to_s
    return seconds


def _is_alone(fault: Fault, healed_s: float, others: Iterable[tuple[Fault, float]]) -> bool:
    return not any(
        other is not fault and other.at_s < healed_s and other_healed_s > fault.at_s for other, other_healed_s in others
    )


def _is_progress(stored: Stored, fault: Fault) -> bool:
    if fault.kind == "nats":
        return True
    if stored.stream not in STREAMS[fault.kind]:
        return False
    return fault.kind not in ("rollout", "reward", "reward-child") or stored.worker == fault.victim


def _hits_again(other: Fault, fault: Fault) -> bool:
    if other is fault or other.at_s < fault.at_s:
        return False
    same = other.victim == fault.victim and (other.kind == fault.kind or other.kind == "reward")
    return same or other.kind in ALL
