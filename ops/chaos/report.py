"""The result of a hunt, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ops.chaos import recovery as definition
from ops.chaos.faults import KINDS
from ops.chaos.judge import Outcome
from ops.chaos.recovery import Recovery


def report(outcomes: Sequence[Outcome], machine: str, command: str) -> str:
    """A row for each kind of process, and what all runs came to together."""
    healed = [recovery for outcome in outcomes for recovery in outcome.recoveries]
    rows = [_row(kind, [recovery for recovery in healed if recovery.fault.kind == kind]) for kind in KINDS]
    ended = sum(outcome.status == 0 for outcome in outcomes)
    totals = [outcome.audit.report.totals for outcome in outcomes]
    broken = sum(check.broken for outcome in outcomes for check in outcome.audit.report.checks)
    return "\n".join(
        [
            "# Chaos",
            "",
            f"`{command}` on {machine}.",
            "",
            "| process | kill -9 | SIGSTOP | alone | median s | worst s | overlapping | median s | worst s |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
            *filter(None, rows),
            _row("all", healed),
            "",
            f"{len(outcomes)} runs, {ended} ended with status 0; {sum(t.get('steps', 0) for t in totals)} steps, "
            f"{sum(t.get('admitted', 0) for t in totals)} samples: "
            f"**{sum(outcome.lost for outcome in outcomes)} lost, "
            f"{sum(outcome.twice for outcome in outcomes)} twice**, {broken} breaches of an invariant in "
            f"{sum(outcome.audit.entries for outcome in outcomes)} log entries. "
            f"Longest time without a step: {max((outcome.step_gap_s for outcome in outcomes), default=0.0):.1f} s.",
            "",
            (definition.__doc__ or "").partition("\n\n")[2].strip(),
            "",
        ]
    )


def _row(name: str, healed: Sequence[Recovery]) -> str:
    if not healed:
        return ""
    stops = sum(recovery.fault.stop for recovery in healed)
    cells = [name, str(len(healed) - stops), str(stops)]
    for alone in (True, False):
        seconds = [recovery.seconds for recovery in healed if recovery.alone == alone]
        cells += [str(len(seconds)), *_told(seconds)]
    return f"| {' | '.join(cells)} |"


def _told(seconds: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("", "")
