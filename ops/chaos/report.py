"""The result of a hunt, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ops.chaos import recovery
from ops.chaos.faults import KINDS, Fault
from ops.chaos.judge import Outcome


def report(outcomes: Sequence[Outcome], machine: str, command: str) -> str:
    """A row for each kind of process, and what all runs came to together."""
    healed = [pair for outcome in outcomes for pair in outcome.recoveries]
    rows = [_row(kind, [pair for pair in healed if pair[0].kind == kind]) for kind in KINDS]
    ended = sum(outcome.status == 0 for outcome in outcomes)
    totals = [outcome.audit.report.totals for outcome in outcomes]
    broken = sum(check.broken for outcome in outcomes for check in outcome.audit.report.checks)
    return "\n".join(
        [
            "# Chaos",
            "",
            f"`{command}` on {machine}.",
            "",
            "| process | kill -9 | SIGSTOP | recovery, median s | 95 % s | worst s |",
            "|---|--:|--:|--:|--:|--:|",
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
            (recovery.__doc__ or "").partition("\n\n")[2].strip(),
            "",
        ]
    )


def _row(name: str, healed: Sequence[tuple[Fault, float]]) -> str:
    if not healed:
        return ""
    seconds = sorted(recovery_s for _, recovery_s in healed)
    stops = sum(fault.stop for fault, _ in healed)
    late = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
    return (
        f"| {name} | {len(healed) - stops} | {stops} | {statistics.median(seconds):.1f} | {late:.1f} "
        f"| {seconds[-1]:.1f} |"
    )
