"""A plan, told: tables for the terminal, a sentence of advice, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ops.plan.outcome import Outcome
from ops.plan.search import ALIKE, Plan
from schemas import UserError

SHARE_SHOWN = 0.005  # smaller shares are 0
WIDE = 110  # columns of a terminal that hold everything
COLUMNS = (
    "rollout\n:train", "\nη", "tokens\n/s", "vs\nsync", "\nstep", "rollout\nidle", "upda-\nting", "slots\nused",
    "trainer\nidle", "stale-\nness", "\nmax", "\nmasked", "\ndropped",
)  # fmt: skip
WHY = {"staleness bound": "η", "pace": "pace", "nothing": ""}
IDLE_TELL = 0.1
EMPTY_TELL = 0.5  # of the slots


def render(plan: Plan, width: int) -> RenderableType:
    """Everything for a terminal of this width; a narrow one is spared three columns."""
    config = plan.workload.controller
    head = Text.assemble(
        (f"{plan.devices} devices", "bold"),
        f", batches of {config.batch_groups} groups of {config.group_size}, "
        f"{plan.workload.lengths.describe()}.\nAn engine: {plan.speeds.engine_devices} device(s), "
        f"{plan.speeds.slots} slots.",
    )
    parts: list[RenderableType] = [head]
    if len(plan.splits) > 1:
        parts.append(_table(f"Splits under η = {plan.reference}, best first", plan, plan.splits, width >= WIDE))
    parts.append(_table(f"{plan.best.rollout}:{plan.best.train} under other bounds", plan, plan.bounds, width >= WIDE))
    parts.append(_others(plan))
    parts.append(Text("\n".join(advice(plan))))
    return Group(*parts)


def _table(title: str, plan: Plan, outcomes: Sequence[Outcome], wide: bool) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    columns = [column for column in COLUMNS if wide or column not in ("upda-\nting", "slots\nused", "\ndropped")]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        cells = _cells(plan, outcome)
        table.add_row(*(cells[name] for name in columns))
    return table


def _cells(plan: Plan, outcome: Outcome) -> dict[str, str]:
    values = (
        f"{outcome.rollout}:{outcome.train}",
        str(outcome.max_staleness),
        quantity(outcome.tokens_per_s),
        f"{plan.speedup(outcome):.2f}x",
        duration(outcome.step_s),
        _idle(outcome.rollout_idle, WHY[outcome.rollout_why]),
        share(outcome.updating),
        share(outcome.occupancy),
        _idle(outcome.trainer_idle, outcome.trainer_why),
        f"{outcome.staleness:.1f}",
        str(outcome.staleness_max),
        share(outcome.masked),
        share(outcome.dropped),
    )
    return dict(zip(COLUMNS, values, strict=True))


def _others(plan: Plan) -> Table:
    table = Table(title="Other schedules", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.header_style = "dim"
    for name, justify in (("schedule", "left"), ("tokens/s", "right"), ("vs sync", "right"), ("step", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("idle", justify="left")
    together = plan.synchronous
    table.add_row(
        f"synchronous, all {plan.devices} generate, then train",
        quantity(together.tokens_per_s),
        "1.00x",
        duration(together.step_s),
        f"{share(together.rollout_idle)} of all",
    )
    overlap, waiting = plan.overlap, plan.waiting
    table.add_row(
        f"one step of overlap, {plan.overlap_split[0]}:{plan.overlap_split[1]}",
        quantity(overlap.tokens_per_s),
        f"{overlap.tokens_per_s / together.tokens_per_s:.2f}x",
        duration(overlap.step_s),
        f"{share(overlap.rollout_idle)}, trainer {share(overlap.trainer_idle)}",
    )
    if waiting is not None:
        table.add_row(
            f"{waiting.rollout}:{waiting.train}, η = {waiting.max_staleness}, on_stale: wait",
            quantity(waiting.tokens_per_s),
            f"{plan.speedup(waiting):.2f}x",
            duration(waiting.step_s),
            f"{share(waiting.rollout_idle)}, trainer {share(waiting.trainer_idle)}",
        )
    return table


def advice(plan: Plan) -> list[str]:
    """What to do, in sentences."""
    chosen = plan.advised
    most = max(plan.bounds, key=lambda outcome: outcome.tokens_per_s)
    speedup = plan.speedup(chosen)
    says = f"Use {chosen.rollout}:{chosen.train} with η = {chosen.max_staleness}: {quantity(chosen.tokens_per_s)} "
    says += f"trained tokens/s, {speedup:.1f} times synchronous training on all {plan.devices}"
    if chosen is not most and chosen.max_staleness < most.max_staleness:
        part = chosen.tokens_per_s / most.tokens_per_s
        says += (
            f"; η = {most.max_staleness} would give {'no more' if part >= 1 - ALIKE else f'{1 / part - 1:.0%} more'}"
        )
    lines = [says + "."]
    lower = [outcome for outcome in plan.bounds if outcome.max_staleness < chosen.max_staleness]
    if lower:
        below = lower[-1]
        lines.append(f"η = {below.max_staleness} would give {below.tokens_per_s / chosen.tokens_per_s:.0%} of that.")
    if speedup < 1:
        lines.append(
            "Synchronous training on all devices is faster here: answers are alike, or the trainer is the limit."
        )
    if plan.waiting is not None:
        gain = plan.waiting.tokens_per_s / chosen.tokens_per_s - 1
        lines.append(
            f"{chosen.too_old:.0%} of the tokens are masked or dropped, too old when their step comes: the longest "
            f"answers live for more than {chosen.max_staleness} steps. controller.on_stale=wait keeps them and gives "
            f" {f'{gain:.0%} more' if gain > ALIKE else 'no more'}; a higher η or fewer slots help too."
        )
    if chosen.trainer_idle > IDLE_TELL and chosen.rollout_idle < chosen.trainer_idle:
        lines.append(
            f"The trainer idles {chosen.trainer_idle:.0%}, waiting for {chosen.trainer_why}: "
            + ("more reward workers help." if chosen.trainer_why == "rewards" else "generation is the limit.")
        )
    elif chosen.occupancy < EMPTY_TELL:
        lines.append(
            f"Engines decode {chosen.occupancy * plan.speeds.slots:.0f} sequences of {plan.speeds.slots}: the trainer "
            "is the limit, or the bound lets no more live."
        )
    return lines


def quantity(value: float) -> str:
    """A rate with three digits: `412`, `3.21k`, `633k`, `1.20M`."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Seconds with three digits, or minutes."""
    if seconds >= 600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.0f} s" if seconds >= 99.5 else f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"


def share(value: float) -> str:
    """A share of one."""
    return "0" if value < SHARE_SHOWN else f"{value:.0%}"


def _idle(value: float, why: str) -> str:
    return f"{share(value)} {why}" if value >= SHARE_SHOWN and why else share(value)


def plot(plan: Plan, path: Path) -> None:
    """Throughput and staleness over η, and throughput over splits, as an image. Raises `UserError`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    bounds = [str(outcome.max_staleness) for outcome in plan.bounds]
    left.plot(bounds, [outcome.tokens_per_s for outcome in plan.bounds], marker="o", label="asynchronous")
    left.axhline(plan.synchronous.tokens_per_s, color="grey", linestyle="--", label="synchronous")
    left.axhline(plan.overlap.tokens_per_s, color="grey", linestyle=":", label="one step of overlap")
    left.set(xlabel="η", ylabel="trained tokens/s", title=f"{plan.best.rollout}:{plan.best.train}", ylim=(0, None))
    left.legend()
    splits = sorted(plan.splits, key=lambda outcome: outcome.rollout)
    right.plot([outcome.rollout for outcome in splits], [outcome.tokens_per_s for outcome in splits], marker="o")
    right.set(xlabel=f"rollout devices of {plan.devices}", title=f"splits under η = {plan.reference}", ylim=(0, None))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"The plot {path} cannot be written: {error}.", "Name a .png or .svg file.") from None
