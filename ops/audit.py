"""`rollstream audit`: read a run's whole log and hold it to the invariants I1-I6.

A run that is going on is read beside its actors. For one that has ended, its server is started on its store for as long
as the reading takes. Nothing is written to the log either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from bus.jetstream import JetStreamBus
from bus.port import Bus, StreamInfo
from bus.table import (
    BATCHES,
    CONTROL,
    DEAD,
    DROPPED,
    PARTIALS,
    PROMPTS,
    ROLLOUTS,
    SCORED,
    STEPS,
    WEIGHTS,
    Stream,
)
from bus.weights import WeightsError, WeightStore
from ops.findings import PROMISES, Report, Rules
from ops.host import weights_folder
from ops.invariants import READ_ORDER, Auditor
from ops.launch import locate
from ops.nats_server import NatsServer, url_of
from ops.recipe import Recipe
from schemas import Control, UserError, WeightVersion

SILENCE_S = 30.0  # an entry that is there and does not come for so long never will
SHOWN_MAX = 10
# Where a growing log is cut: what refers is measured before what it refers to, which can only have grown meanwhile.
# Drops come after the prompts that are held to the gate, and before those that they may end.
CUT_ORDER = (STEPS, BATCHES, SCORED, PARTIALS, ROLLOUTS, DROPPED, PROMPTS, WEIGHTS, CONTROL, DEAD)


@dataclasses.dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit of a run found. `entries` were read in `seconds`."""

    run: str
    report: Report
    entries: int
    seconds: float

    @property
    def clean(self) -> bool:
        """Whether every invariant holds."""
        return self.report.clean

    def to_json(self) -> str:
        """All of it, for programs."""
        return json.dumps({"clean": self.clean, **dataclasses.asdict(self)}, indent=2)


async def main(target: Path, as_json: bool) -> int:
    """Audit the run in the folder `target` and print what was found; 0 if all invariants hold, else 1."""
    report = await audit_run(target)
    if as_json:
        print(report.to_json())
    else:
        _print(report)
    return 0 if report.clean else 1


async def audit_run(folder: Path) -> AuditReport:
    """Audit the run in a folder, whether it is going on or has ended. Raises `UserError` if it cannot be read."""
    where = locate(folder, None, None)
    async with server_of(folder, where.url) as url:
        bus = JetStreamBus(where.run, url, "audit")
        await bus.connect()
        try:
            if not await bus.exists():
                raise UserError(f"The server holds no run {where.run}.", "Was it purged? Then nothing can be proved.")
            return await audit_log(bus, WeightStore(weights_folder(folder)))
        finally:
            await bus.close()


@contextlib.asynccontextmanager
async def server_of(folder: Path, url: str) -> AsyncIterator[str]:
    """The URL of a server that holds the run: the one that runs, or one of our own on the run's store."""
    own = url_of(folder)
    if own is None:
        yield url
    elif await asyncio.to_thread(_answers, own):
        yield own
    else:
        server = NatsServer()
        try:
            yield await server.start(folder)
        finally:
            await server.stop()


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 4222), timeout=1.0).close()
    except OSError:
        return False
    return True


async def audit_log(bus: Bus, store: WeightStore | None = None) -> AuditReport:
    """Audit the run of a connected bus; with `store`, the weights' bytes too, as far as they are kept.

    Raises:
        UserError: a part of the log was purged, so that nothing can be proved.
    """
    started = time.monotonic()
    gated_seq = (await bus.info(PROMPTS)).last_seq
    cut = {stream.name: await _measured(bus, stream) for stream in CUT_ORDER}
    auditor = Auditor(_rules_of, lambda event: _digest_of(store, event) if store else None, gated_seq)
    entries = 0
    for stream in READ_ORDER:
        entries += await _feed(auditor, bus, stream, cut[stream.name])
    return AuditReport(bus.run, auditor.report(), entries, time.monotonic() - started)


async def _measured(bus: Bus, stream: Stream) -> StreamInfo:
    info = await bus.info(stream)
    if info.first_seq > 1 and not stream.newest_only:
        raise UserError(
            f"The {stream.name} of run {bus.run} begin at {info.first_seq}: what was before is purged.",
            "Audit a run before purging it.",
        )
    return info


async def _feed(auditor: Auditor, bus: Bus, stream: Stream, info: StreamInfo) -> int:
    if not info.messages:
        return 0
    count = 0
    entries = aiter(bus.read(stream))
    try:
        while True:
            async with asyncio.timeout(SILENCE_S):
                entry = await anext(entries)
            if entry.seq <= info.last_seq:
                auditor.feed(entry)
                count += 1
            if entry.seq >= info.last_seq:  # the newest of a key may have been replaced by a later one meanwhile
                return count
    except TimeoutError:
        raise UserError(
            f"The {stream.name} of run {bus.run} cannot be read to their end ({count} of {info.messages} came).",
            "Is the server overloaded? Try again.",
        ) from None
    finally:
        await entries.aclose()  # type: ignore[attr-defined]


def _rules_of(control: Control, time_s: float) -> Rules | None:
    try:
        recipe = Recipe.from_yaml(control.recipe)
    except UserError:  # of another version of Rollstream; what needs no rules is checked all the same
        return None
    return Rules(time_s, recipe.controller.max_staleness, recipe.controller.batch_groups, recipe.steps)


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
    for check in report.checks:
        for what in check.examples[:SHOWN_MAX]:
            console.print(f"{check.name}: {what}", style="red", markup=False, soft_wrap=True)
        if check.broken > SHOWN_MAX:
            console.print(f"{check.name}: and {check.broken - SHOWN_MAX:,} more", style="red")
    console.print(", ".join(f"{name} {count:,}" for name, count in report.totals.items()), markup=False, soft_wrap=True)
    for letter in report.dead_letters[:SHOWN_MAX]:
        console.print(f"dead letter: {letter}", style="yellow", markup=False, soft_wrap=True)
    verdict = "all invariants hold" if report.clean else "INVARIANTS ARE BROKEN"
    console.print(f"{verdict} ({audit.entries:,} entries in {audit.seconds:.1f} s)")
