"""What came of a run under fire: its audit, the recovery of each fault, and the longest time without a step."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from bus.table import BATCHES, CONTROL, DROPPED, PROMPTS, ROLLOUTS, SCORED, STEPS, WEIGHTS, Stream
from ops.audit import AuditReport, audit_log
from ops.chaos.faults import Fault
from ops.chaos.recovery import Recovery, Started, Stored, recoveries
from ops.log_source import LogSource, open_log
from schemas import Rollout, Scored

STREAMS = (PROMPTS, ROLLOUTS, SCORED, BATCHES, WEIGHTS, STEPS, DROPPED, CONTROL)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One run: its launcher's exit status (None: it did not end), its audit, the recovery of its faults."""

    status: int | None
    audit: AuditReport
    recoveries: tuple[Recovery, ...]
    step_gap_s: float

    @property
    def lost(self) -> int:
        """Samples without an end."""
        return self._broken("I2") + self.audit.report.totals.get("open", 0)

    @property
    def twice(self) -> int:
        """Samples or steps that were trained twice."""
        return self._broken("I3")

    @property
    def sound(self) -> bool:
        """Whether it ended as it should, and its log too."""
        return self.status == 0 and self.audit.clean and self.audit.report.ended and not self.lost

    def _broken(self, invariant: str) -> int:
        return sum(check.broken for check in self.audit.report.checks if check.name == invariant)


async def judge(folder: Path, status: int | None, faults: Sequence[Fault], end_s: float) -> Outcome:
    """Audit a run and measure its recoveries, which are kept in its `faults.json`. It ended at `end_s`."""
    async with open_log(str(folder)) as log:
        audit = await audit_log(log)
        stored = [entry for stream in STREAMS for entry in await _stored(log, stream)]
    steps = sorted(entry.time_s for entry in stored if entry.stream == STEPS.name)
    healed = recoveries(faults, stored, _starts(folder), end_s)
    (folder / "faults.json").write_text(json.dumps([dataclasses.asdict(recovery) for recovery in healed], indent=1))
    gap_s = max((after - before for before, after in itertools.pairwise(steps)), default=0.0)
    return Outcome(status, audit, tuple(healed), gap_s)


async def _stored(log: LogSource, stream: Stream) -> list[Stored]:
    stored: list[Stored] = []
    async for entry in log.read(stream):
        message = entry.message() if stream in (ROLLOUTS, SCORED) else None
        worker = message.worker if isinstance(message, Rollout | Scored) else ""
        stored.append(Stored(entry.time_s, stream.name, worker))
    return stored


def _starts(folder: Path) -> list[Started]:
    starts: list[Started] = []
    for line in (folder / "logs" / "launcher.jsonl").read_bytes().splitlines():
        with contextlib.suppress(ValueError, KeyError):  # a killed launcher may leave half a line
            event = json.loads(line)
            if event["event"] == "process_started":
                starts.append(Started(datetime.fromisoformat(event["timestamp"]).timestamp(), event["process"]))
    return starts
