"""The result of a soak, as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.soak import memory

if TYPE_CHECKING:
    from ops.soak.command import Outcome, Soak

AGE_MAX = 1.5
DISCARDED_MAX = 0.01


def report(asked: Soak, outcome: Outcome, machine: str) -> str:
    """What was done, what was asked of it, and what came of it."""
    told, audit = outcome.account, outcome.audit
    killed = sum(len(move.killed) for move in outcome.moves)
    left = sum(max(0, move.before - move.workers) for move in outcome.moves)
    numbers = " → ".join(str(count) for count in (2, *(move.workers for move in outcome.moves)))
    broken = sum(check.broken for check in audit.report.checks)
    open_ = audit.report.totals.get("open", 0)
    lost = f"{told.lost:,.0f} died with killed workers"
    dropped = "".join(f", {count:,} dropped as {reason}" for reason, count in told.dropped.items() if count)
    rows = [
        ("mean age of trained tokens, versions", f"{told.age:.2f}", f"≤ {AGE_MAX}", told.age <= AGE_MAX),
        ("tokens discarded", f"{told.discarded:.2%}", f"≤ {DISCARDED_MAX:.0%}", told.discarded <= DISCARDED_MAX),
        ("breaches of an invariant", str(broken), "0", audit.clean),
        ("samples without an end", str(open_), "0", not open_),
    ]
    return "\n".join(
        [
            "# Soak",
            "",
            f"`{asked.command}` on {machine}.",
            "",
            f"{outcome.seconds:.0f} s, {told.steps} steps, {told.generated:,.0f} tokens generated. "
            f"{len(outcome.moves)} moves, {numbers} workers: {left} left and {killed} were killed.",
            "",
            "| | found | asked for | |",
            "|---|--:|--:|---|",
            *(f"| {what} | {found} | {wanted} | {_mark(holds)} |" for what, found, wanted, holds in rows),
            "",
            f"Of the generated tokens {lost}, {told.masked:,} were masked{dropped}. "
            f"Trained tokens by age: {', '.join(f'{age}: {count:,}' for age, count in enumerate(told.ages))}.",
            "",
            "| resident memory of | lives | median MB | grown by MB | in s | |",
            "|---|--:|--:|--:|--:|---|",
            *(
                f"| {growth.name} | {growth.lives} | {growth.median / 1e6:.0f} | {growth.grown / 1e6:+.1f} "
                f"| {growth.over_s:.0f} | {_mark(not growth.grows)} |"
                for growth in outcome.growths
            ),
            "",
            (memory.__doc__ or "").partition("\n\n")[2].strip(),
            "",
        ]
    )


def _mark(holds: bool) -> str:
    return "✓" if holds else "✗"
