"""Draws a `RunView`: a live screen on a terminal, one flushed line a step elsewhere. Both are a `Screen`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ops.chart import bar, line_chart
from ops.drops import samples
from ops.evaluate import in_words
from ops.view import ActorView, RunView, running_mean

NOTES_SHOWN = 3
CHART_ROWS = (6, 10)  # fewest and most; a low terminal gets a lower chart
OTHER_LINES = 18  # what the rest of the screen needs
FACTS_WIDTH = 36
LEGEND_WIDTH = 78  # of a chart, from which on its legend tells evaluations in numbers
WIDTH_MAX = 140
IDLE_WORTH_TELLING = 0.05
FAILURES_EVERY_S = 10.0  # in plain lines; the first at once


class Screen(Protocol):
    """Where a run is shown."""

    def show(self, view: RunView, now_s: float) -> None:
        """Show the state at Unix time `now_s`. To be called twice a second or so."""

    def note(self, text: str) -> None:
        """Tell what happened beside the steps: an actor was restarted, a drain began."""

    def close(self) -> None:
        """Give the terminal back."""


def open_screen(plain: bool = False) -> Screen:
    """The live screen if standard output is a terminal that can show it, plain lines if not or if asked for."""
    console = Console()
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return PlainScreen() if plain or not console.is_terminal or not utf8 else LiveScreen(console)


class PlainScreen:
    """One line a step, for logs and pipes."""

    COLUMNS = (
        ("step", 9), ("reward", 7), ("mean5", 7), ("len", 6), ("stale", 6), ("max", 4), ("entropy", 8), ("grad", 7),
        ("clip", 6), ("kl", 8), ("gen tok/s", 10), ("train tok/s", 12), ("elapsed", 8),
    )  # fmt: skip

    def __init__(self) -> None:
        self._shown = -1
        self._headed = False
        self._evaluations: set[int] = set()  # versions
        self._failures = 0  # told
        self._failures_s = -math.inf

    def show(self, view: RunView, now_s: float) -> None:
        """Print the steps and evaluations that are new, and now and then what has failed."""
        if not self._headed:
            self._headed = True
            self._evaluations = set(view.evaluations)  # told already
            self._print(f"run {view.run}: {view.steps} steps of {view.batch_samples} samples, η = {view.max_staleness}")
            self._print(" ".join(name.rjust(width) for name, width in self.COLUMNS))
        series = view.series
        smooth = running_mean([point.reward or 0.0 for point in series])
        for point, mean5 in zip(series, smooth, strict=True):
            if point.step <= self._shown:
                continue
            self._shown = point.step
            if point.time_s < view.started_s:  # of before a resume
                continue
            metrics = point.metrics
            cells = (
                f"{point.step + 1}/{view.steps}", _number(point.reward, 3), _number(mean5, 3), _number(point.length, 1),
                _number(point.staleness_mean, 2), str(point.staleness_max), _number(metrics.get("entropy"), 3),
                _number(metrics.get("grad_norm"), 3), _number(metrics.get("clip_fraction"), 3),
                _number(metrics.get("mismatch_kl"), 5), _number(view.generated_per_s(), 0),
                _number(view.trained_per_s(), 0), _clock(point.time_s - view.started_s),
            )  # fmt: skip
            self._print(" ".join(cell.rjust(width) for cell, (_, width) in zip(cells, self.COLUMNS, strict=True)))
        for version, evaluation in view.evaluations.items():
            if version not in self._evaluations:
                self._evaluations.add(version)
                best = "" if view.best is None else f"; best so far: version {view.best.version}"
                self._print(f"-- held-out reward of version {version}: {in_words(evaluation)}{best}")
        failures = view.drops.failed.total()
        if failures > self._failures and now_s - self._failures_s >= FAILURES_EVERY_S:
            self._failures, self._failures_s = failures, now_s
            self._print(f"-- {view.drops.failed_in_words()}")

    def note(self, text: str) -> None:
        """Print it."""
        self._print(f"-- {text}")

    def close(self) -> None:
        """Nothing to give back."""

    @staticmethod
    def _print(line: str) -> None:
        print(line, flush=True)


class LiveScreen:
    """The live screen. What others print meanwhile appears above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._notes: list[str] = []
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._open = False

    def show(self, view: RunView, now_s: float) -> None:
        """Draw it anew."""
        if not self._open:
            self._open = True
            self._live.start()
        self._live.update(draw(view, now_s, self._console.width, self._console.height, self._notes), refresh=True)

    def note(self, text: str) -> None:
        """Show it below the actors; the newest few stay."""
        self._notes = [*self._notes, text][-NOTES_SHOWN:]
        if not self._open:
            self._console.print(f"[dim]{text}[/]", highlight=False)

    def close(self) -> None:
        """Leave the last picture standing."""
        if self._open:
            self._open = False
            self._live.stop()


def draw(view: RunView, now_s: float, width: int, height: int, notes: Sequence[str] = ()) -> RenderableType:
    """The whole screen, for a terminal of `width` × `height` characters."""
    width = min(width, WIDTH_MAX)
    side_by_side = width >= 76
    rows = min(CHART_ROWS[1], max(CHART_ROWS[0], height - OTHER_LINES))
    chart = _reward_panel(view, width - FACTS_WIDTH if side_by_side else width, rows)
    facts = _facts_panel(view, rows)
    parts: list[RenderableType] = [_head(view, now_s, width)]
    if side_by_side:
        row = Table.grid(expand=False)
        row.add_column(width=width - FACTS_WIDTH)
        row.add_column(width=FACTS_WIDTH)
        row.add_row(chart, facts)
        parts.append(row)
    else:
        parts += [chart, facts]
    parts.append(_flow_panel(view, now_s, width))
    parts.append(_actors_panel(view, now_s, width))
    if failed := view.drops.failed_in_words():
        parts.append(Text(f" {failed}", "red"))
    parts += [Text(f" {note}", "yellow", no_wrap=True, overflow="ellipsis") for note in notes]
    return Group(*parts)


def _head(view: RunView, now_s: float, width: int) -> RenderableType:
    done = view.last.step + 1 if view.last else 0
    left = view.remaining_s(now_s)
    grid = Table.grid(padding=(0, 1))
    for _ in range(4):
        grid.add_column(no_wrap=True)
    times = f"{_clock(now_s - view.started_s)} elapsed" + (f", {_clock(left)} left" if left is not None else "")
    bar_width = max(10, width - len(view.run) - len(times) - 24)
    grid.add_row(
        Text(f" {view.run}", "bold"),
        Text(f"step {done} of {view.steps}"),
        ProgressBar(total=view.steps, completed=done, width=bar_width),
        Text(times, "dim"),
    )
    return grid


def _reward_panel(view: RunView, width: int, rows: int) -> Panel:
    points = [(point.step, point.reward) for point in view.series if point.reward is not None]
    smooth = running_mean([reward for _, reward in points])
    lines = line_chart(points, smooth, max(view.steps, 2), width - 4, rows, view.evals)
    legend = "[green]━[/] 5-step mean  [dim]⠂ step[/]" + _held_out(view, width)
    return Panel(
        Group(*lines), title="reward", subtitle=legend, title_align="left", subtitle_align="right", width=width
    )


def _held_out(view: RunView, width: int) -> str:
    """The last evaluation and the best one, as far as there is room for them."""
    if not view.evals or view.best is None:
        return ""
    (version, reward), best = view.evals[-1], view.best
    told = f"  [yellow]◆[/] held out {reward:.3f} (v{version}), best {best.reward:.3f} (v{best.version})"
    return told if width >= LEGEND_WIDTH else "  [yellow]◆[/] held out"


def _facts_panel(view: RunView, rows: int) -> Panel:
    point = view.last
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(justify="right")
    if point is None:
        return Panel(Text("waiting for the first step", "dim"), title="step", title_align="left", height=rows + 4)
    metrics = point.metrics
    for name, value in (
        ("reward", _number(point.reward, 3)),
        ("response length", _number(point.length, 1)),
        ("entropy", _number(metrics.get("entropy"), 3)),
        ("gradient norm", _number(metrics.get("grad_norm"), 3)),
        ("clipped tokens", _percent(metrics.get("clip_fraction"))),
        ("mismatch KL", _number(metrics.get("mismatch_kl"), 5)),
        ("staleness, max", f"{point.staleness_mean:.2f}, {point.staleness_max} of {view.max_staleness}"),
    ):
        grid.add_row(name, value)
    total = sum(point.staleness)
    ages = Table.grid(padding=(0, 1))
    # Five lines are there; with a larger η the last one stands for all older ages.
    shown = min(max(view.max_staleness, point.staleness_max), 4)
    for age in range(shown + 1):
        more = age == shown and point.staleness_max > shown
        tokens = sum(point.staleness[age:]) if more else (point.staleness[age] if age < len(point.staleness) else 0)
        share = tokens / total if total else 0.0
        ages.add_row(Text(f"{age}{'+' if more else ' '}", "dim"), Text(bar(share, 20), "cyan"), f"{share:4.0%}")
    return Panel(Group(grid, ages), title=f"step {point.step + 1}", title_align="left", height=rows + 4)


def _flow_panel(view: RunView, now_s: float, width: int) -> Panel:
    def count(role: str, name: str) -> str:
        return _number(view.gauge(role, name, now_s), 0)

    stages = (
        ("groups in flight", f"{count('controller', 'in_flight_groups')} of {count('controller', 'group_limit')}"),
        ("generating", f"{count('rollout', 'running')} + {count('rollout', 'waiting')} waiting"),
        ("scoring", count("reward", "in_flight")),
        ("ready groups", count("controller", "ready_groups")),
        ("training step", str(view.last.step + 2 if view.last and view.last.step + 1 < view.steps else view.steps)),
    )
    flow = Table.grid(padding=(0, 1), expand=True)
    cells: list[RenderableType] = []
    for index, (name, value) in enumerate(stages):
        flow.add_column(justify="center", no_wrap=True)
        cells.append(Text(value, "bold", justify="center") + Text(f"\n{name}", "dim"))
        if index < len(stages) - 1:
            flow.add_column(justify="center", width=1)
            cells.append(Text("→", "dim"))
    flow.add_row(*cells)
    generated, trained = view.generated_per_s(), view.trained_per_s()
    dropped = sum(view.dropped.values())
    rates = f"{_number(generated, 0)} tokens/s generated, {_number(trained, 0)} trained"
    rates += f", {samples(dropped)} dropped" if dropped else ""
    return Panel(flow, title="flow", subtitle=rates, title_align="left", subtitle_align="right", width=width)


def _actors_panel(view: RunView, now_s: float, width: int) -> Panel:
    table = Table(box=None, padding=(0, 1), expand=True, header_style="dim")
    table.add_column("actor", no_wrap=True)
    table.add_column("busy", no_wrap=True, width=16)
    table.add_column("doing", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("CPU s", justify="right", no_wrap=True)
    told: set[str] = set()
    for actor in view.by_role():
        first = actor.process not in told  # several actors of one process report the same number: show it once
        told.add(actor.process)
        table.add_row(*_actor_row(view, actor, now_s, first))
    if not view.actors:
        table.add_row(Text("no actor has been heard yet", "dim"))
    return Panel(table, title="actors", title_align="left", width=width)


def _actor_row(view: RunView, actor: ActorView, now_s: float, cpu_here: bool) -> tuple[RenderableType, ...]:
    cpu = _number(view.processes[actor.process].cpu_s, 1) if cpu_here else Text("shared", "dim")
    if actor.ended:
        return Text(actor.actor, "dim"), Text("ended", "dim"), "", cpu
    if actor.silent(now_s):
        return Text(actor.actor, "red"), Text(f"silent {_clock(now_s - actor.heard_s)}", "red"), "", cpu
    if actor.idle_share is None:
        return actor.actor, "", actor.state, cpu
    busy = 1.0 - actor.idle_share
    gauge = Text(bar(busy, 10), "green") + Text(f" {busy:4.0%}")
    waits = actor.idle_why and actor.idle_share > IDLE_WORTH_TELLING
    doing = Text(f"waits for {actor.idle_why}" if waits else actor.state, "dim")
    return actor.actor, gauge, doing, cpu


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
