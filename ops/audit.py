"""`rollstream audit`: read a run's whole log, or a recording, and hold it to the invariants I1-I6, by request I7 too.

A run that is going on is read beside its actors. For one that has ended, its server is started on its store for as long
as the reading takes. Nothing is written to the log either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Self

import yaml
from rich.console import Console
from rich.table import Table

from bus.table import STREAMS
from bus.weights import WeightsError, WeightStore
from ops.findings import PROMISES, Check, Report, Rules
from ops.host import weights_folder
from ops.invariants import READ_ORDER, Auditor
from ops.log_source import LogSource, RunLog, open_log
from ops.progress import Progress
from ops.recording.reader import Recording
from schemas import Control, UserError, WeightVersion

LOOK_EVERY = 4096  # entries, at the clock
SHOWN_MAX = 10
SHOWN_IF_DAMAGED_MAX = 2  # what is missing breaks promises without end
KNOWN = {stream.name for stream in READ_ORDER}
NEWEST_ONLY = {stream.name for stream in STREAMS if stream.newest_only}


@dataclasses.dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit of a run found. `entries` were read in `seconds`; `damage` is what could not be, in sentences."""

    run: str
    report: Report
    entries: int
    seconds: float
    damage: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether the log is whole and every invariant holds."""
        return self.report.clean and not self.damage

    def with_check(self, check: Check) -> Self:
        """The report with one more check, before the last."""
        *invariants, log = self.report.checks
        report = dataclasses.replace(self.report, checks=(*invariants, check, log))
        return dataclasses.replace(self, report=report)

    def to_json(self) -> str:
        """All of it, for programs."""
        return json.dumps({"clean": self.clean, **dataclasses.asdict(self)}, indent=2)


async def main(target: str | None, as_json: bool, replay: bool = False) -> int:
    """Audit a run or a recording and print what was found; 0 if it is whole and all invariants hold, else 1.

    With `replay` its steps are trained again, for I7.
    """
    async with open_log(target) as log:
        with contextlib.closing(Progress("checking")) as progress:
            audit = await audit_log(log, progress)
        if replay:
            from ops.replay.into_trainer import check_replay

            audit = audit.with_check(await check_replay(log))
    if as_json:
        print(audit.to_json())
    else:
        _print(audit)
    return 0 if audit.clean else 1


async def audit_run(folder: Path) -> AuditReport:
    """Audit the run in a folder, whether it is going on or has ended. Raises `UserError` if it cannot be read."""
    async with open_log(str(folder)) as log:
        return await audit_log(log)


async def audit_log(log: LogSource, progress: Progress | None = None) -> AuditReport:
    """Audit a log; that of a run folder together with its weights' bytes, as far as they are kept.

    `progress` is shown, if given.

    Raises:
        UserError: a part of the log was purged, so that nothing can be proved.
    """
    started = time.monotonic()
    cut = await log.cut()
    for name, info in cut.streams.items():
        if info.first_seq > 1 and name not in NEWEST_ONLY:
            raise UserError(
                f"The {name} of run {log.run} begin at {info.first_seq}: what was before is purged.",
                "Audit a run before purging it.",
            )
    store = WeightStore(weights_folder(log.folder)) if isinstance(log, RunLog) else None
    auditor = Auditor(_rules_of, lambda event: _digest_of(store, event) if store else None, cut.gated_seq)
    progress = progress or Progress("checking", shown=False)
    progress.total = sum(info.messages for info in cut.streams.values())
    entries = 0
    for stream in READ_ORDER:
        async for entry in log.read(stream, 1, cut.of(stream).last_seq + 1):
            auditor.feed(entry)
            entries += 1
            if entries % LOOK_EVERY == 0:
                progress.show(entries)
    if isinstance(log, Recording):
        await asyncio.to_thread(log.check_files)
    unknown = tuple(
        f"it holds {info.messages:,} {name}, which this Rollstream does not know and has not checked"
        for name, info in cut.streams.items()
        if info.messages and name not in KNOWN
    )
    return AuditReport(log.run, auditor.report(), entries, time.monotonic() - started, (*log.damage, *unknown))


def _rules_of(control: Control, time_s: float) -> Rules | None:
    """Only the keys that are needed: a recipe of another version of Rollstream may not be valid as a whole."""
    try:
        recipe = yaml.safe_load(control.recipe)
        gate = recipe["controller"]
        return Rules(time_s, int(gate["max_staleness"]), int(gate["batch_groups"]), int(recipe["steps"]))
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _digest_of(store: WeightStore, event: WeightVersion) -> str | None:
    try:
        with store.resolve(event.path).open("rb") as file:
            return f"sha256-{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except (WeightsError, OSError):  # collected
        return None


def _print(audit: AuditReport) -> None:
    report, console = audit.report, Console(highlight=False)
    table = Table(title=f"{audit.run}: {'ended' if report.ended else 'not ended'}", title_justify="left")
    for column in ("invariant", "promise", "checked", "broken"):
        table.add_column(column, justify="right" if column in ("checked", "broken") else "left")
    for check in report.checks:
        style = "red" if check.broken else None
        table.add_row(check.name, PROMISES[check.name], f"{check.checked:,}", f"{check.broken:,}", style=style)
    console.print(table)
    for damage in audit.damage[:SHOWN_MAX]:
        console.print(f"damage: {damage}", style="red", markup=False, soft_wrap=True)
    if len(audit.damage) > SHOWN_MAX:
        console.print(f"damage: and {len(audit.damage) - SHOWN_MAX:,} more", style="red")
    shown = SHOWN_IF_DAMAGED_MAX if audit.damage else SHOWN_MAX
    for check in report.checks:
        for what in check.examples[:shown]:
            console.print(f"{check.name}: {what}", style="red", markup=False, soft_wrap=True)
        if check.broken > shown:
            console.print(f"{check.name}: and {check.broken - shown:,} more", style="red")
    console.print(", ".join(f"{name} {count:,}" for name, count in report.totals.items()), markup=False, soft_wrap=True)
    for letter in report.dead_letters[:SHOWN_MAX]:
        console.print(f"dead letter: {letter}", style="yellow", markup=False, soft_wrap=True)
    verdict = "all invariants hold" if report.clean else "INVARIANTS ARE BROKEN"
    if audit.damage:
        verdict = "THE RECORDING IS DAMAGED: what is missing may be all that breaks the promises, or hide what does"
    console.print(f"{verdict} ({audit.entries:,} entries in {audit.seconds:.1f} s)", soft_wrap=True)
