"""`rollstream replay reward`: every recorded answer scored again, and every verdict that changed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.reward.verdict import Verdict
from bus.table import ROLLOUTS
from ops.console import open_console, tell_damage
from ops.log_source import open_log
from ops.progress import Progress, stopped_by_ctrl_c
from ops.replay.changes import read_changes
from ops.replay.history import newest_recipe_of
from ops.replay.rescore import Rescored, rescore_log, reward_pool
from schemas import UserError


@dataclasses.dataclass(slots=True)
class Totals:
    """Of a re-scoring: rollouts looked at, verdicts changed, sums of the rewards where both have one."""

    rollouts: int = 0
    changed: int = 0
    without_verdict: int = 0  # in the log
    own: int = 0  # rewards that episodes gave themselves
    both: int = 0
    reward_before: float = 0.0
    reward_after: float = 0.0
    statuses: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)  # (before, after), where changed

    def count(self, one: Rescored) -> None:
        """Take one more."""
        self.rollouts += 1
        self.changed += one.changed
        self.own += one.own
        if one.before is None:
            self.without_verdict += 1
        elif one.before.reward is not None and one.after.reward is not None:
            self.both += 1
            self.reward_before += one.before.reward
            self.reward_after += one.after.reward
        if one.changed and one.before is not None:
            self.statuses[one.before.status, one.after.status] += 1


async def main(target: str | None, overrides: Sequence[str], out: Path | None, check: bool) -> int:
    """Score a log's rollouts again and list what changed; 0, or 130 after Ctrl-C.

    With `check` 1 if a verdict changed, or a part of the log could not be read.

    Raises:
        UserError: the log cannot be read, the reward cannot be loaded, or `out` cannot be written.
    """
    changes = read_changes(overrides, reward=True, trainer=False)
    console = open_console()
    began = time.monotonic()
    totals = Totals()
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(open_log(target))
        recipe = changes.recipe(newest_recipe_of(source), source.run)
        stop = stack.enter_context(stopped_by_ctrl_c())
        pool = await stack.enter_async_context(reward_pool(recipe, source))
        try:
            lines = stack.enter_context(out.open("w", encoding="utf-8")) if out is not None else None
        except OSError as error:
            raise UserError(f"{out} cannot be written: {error}.", "Give another file with --out.") from None
        progress = stack.enter_context(contextlib.closing(Progress("scored", (await source.info(ROLLOUTS)).messages)))
        async for one in rescore_log(source, pool):
            totals.count(one)
            if one.changed:
                progress.close()
                console.print(sentence(one), markup=False, soft_wrap=True)
            if lines is not None:
                lines.write(to_json(one) + "\n")
            progress.show(totals.rollouts)
            if stop.is_set():
                break
        damage = source.damage
    seconds = time.monotonic() - began
    kinds = ", ".join(f"{old} → {new} {count:,}" for (old, new), count in sorted(totals.statuses.items()))
    console.print(
        f"{totals.changed:,} of {totals.rollouts:,} verdicts changed"
        + (f" ({kinds})" if kinds else "")
        + f", by {recipe.reward.function}, in {seconds:.1f} s",
        markup=False,
        soft_wrap=True,
    )
    if totals.both:
        before, after = totals.reward_before / totals.both, totals.reward_after / totals.both
        console.print(f"mean reward {before:.4f} → {after:.4f} over {totals.both:,} answers scored both times")
    if totals.own:
        console.print(f"{totals.own:,} rewards are their episodes' own: no function was asked")
    if totals.without_verdict:
        console.print(f"{totals.without_verdict:,} rollouts have no verdict in the log")
    tell_damage(damage, console)
    if stop.is_set():
        console.print("stopped before the end", style="yellow")
        return 130
    return 1 if check and (totals.changed or damage) else 0


def sentence(one: Rescored) -> str:
    """`12-3: reward 1 → reward 0, parts format 1 → 0.5, length 0.2`."""
    assert one.before is not None
    text = f"{one.sample_id}: {_told(one.before)} → {_told(one.after)}"
    if one.changed_process:
        sums = [sum(verdict.token_rewards) for verdict in (one.before, one.after)]
        text += f", process rewards that sum up to {sums[0]:g} → {sums[1]:g}"
    if one.after.parts:
        text += f", parts {_parts(one.before.parts, one.after.parts)}"
    if one.after.detail and one.after.status != "scored":
        text += f" ({one.after.detail})"
    return text


def to_json(one: Rescored) -> str:
    """One line with both verdicts."""
    return json.dumps({**dataclasses.asdict(one), "changed": one.changed})


def _told(verdict: Verdict) -> str:
    return f"reward {verdict.reward:g}" if verdict.reward is not None else verdict.status


def _parts(old: Mapping[str, float], new: Mapping[str, float]) -> str:
    told = []
    for name, value in new.items():
        before = f"{old[name]:g} → " if name in old and old[name] != value else ""
        told.append(f"{name} {before}{value:g}")
    return ", ".join(told)
