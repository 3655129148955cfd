"""What a run came to: numbers for a person, JSON for programs, one PNG."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ops.chart import bar
from ops.drops import by_reason, samples
from ops.view import METRICS_KEPT, RunView, StepPoint, mean_staleness, running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH_STEPS = 5
EDGE_STEPS = 5  # the first and last steps whose mean reward is told
EVALUATIONS_SHOWN = 5  # in words, the first among them
EVALUATIONS_MARKED = 20  # in the plot, with marks of full size


@dataclasses.dataclass(frozen=True, slots=True)
class ActorSummary:
    """One actor: the share of its time in which it had nothing to do, and what it mostly waited for."""

    actor: str
    role: str
    idle_share: float | None
    waits_for: str


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A run's result. Times in seconds; `evaluations` are (version, mean held-out reward), `best` the best of them.

    `dropped` samples ended untrained, by reason; of each reason that is a failure, `failures` tells the newest.
    `staleness[i]` trained tokens were i versions old. `generated_per_s` and `trained_per_s` run from the first to the
    last step of this start. `cpu_s` maps the actors that share a process to its CPU seconds, start-up included;
    `cpu_per_step_s` is what all processes used between the first and the last step, a step: what a longer run would
    cost. `series` has one value a step under each name.
    """

    run: str
    steps: int
    steps_planned: int
    batch_samples: int
    max_staleness: int
    seconds: float
    reward_first: float | None
    reward_last: float | None
    evaluations: list[tuple[int, float]]
    best: tuple[int, float] | None
    staleness: list[int]
    staleness_mean: float
    staleness_max: int
    tokens_generated: int
    tokens_trained: int
    generated_per_s: float | None
    trained_per_s: float | None
    dropped: dict[str, int]
    failures: dict[str, str]
    actors: list[ActorSummary]
    cpu_s: dict[str, float]
    cpu_total_s: float
    cpu_per_step_s: float | None
    series: dict[str, list[float | None]]

    def to_json(self) -> str:
        """JSON that `from_json` reads back."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The summary in `text`. Raises `ValueError` if it is none."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["actors"] = [ActorSummary(**actor) for actor in fields["actors"]]
            fields["evaluations"] = [_scored(pair) for pair in fields["evaluations"]]
            fields["best"] = None if fields["best"] is None else _scored(fields["best"])
            return cls(**fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"no summary: {error}") from None


def summarise(view: RunView, now_s: float) -> Summary:
    """Sum up what the view has seen until Unix time `now_s`."""
    series, session = view.series, view.session
    rewards = [point.reward for point in series if point.reward is not None]
    seconds = session[-1].time_s - session[0].time_s if len(session) > 1 else 0.0
    trained = sum(point.tokens for point in session[1:])
    generated = session[-1].generated - session[0].generated if session else 0
    return Summary(
        run=view.run,
        steps=len(series),
        steps_planned=view.steps,
        batch_samples=view.batch_samples,
        max_staleness=view.max_staleness,
        seconds=now_s - view.started_s,
        reward_first=_mean(rewards[:EDGE_STEPS]),
        reward_last=_mean(rewards[-EDGE_STEPS:]),
        evaluations=view.evals,
        best=None if view.best is None or view.best.reward is None else (view.best.version, view.best.reward),
        staleness=view.staleness,
        staleness_mean=mean_staleness(view.staleness),
        staleness_max=max((point.staleness_max for point in series), default=0),
        tokens_generated=view.generated,
        tokens_trained=sum(point.tokens for point in series),
        generated_per_s=generated / seconds if seconds and generated else None,  # no beat came between the steps
        trained_per_s=trained / seconds if seconds else None,
        dropped=view.dropped,
        failures={reason: str(failure) for reason, failure in view.drops.newest_by_reason.items()},
        actors=[
            ActorSummary(actor.actor, actor.role, actor.idle_share_overall, actor.idle_why_mostly)
            for actor in view.by_role()
        ],
        cpu_s=view.cpu_by_actor(),
        cpu_total_s=view.cpu_s,
        cpu_per_step_s=(session[-1].cpu_s - session[0].cpu_s) / (len(session) - 1) if len(session) > 1 else None,
        series=_series(view, series),
    )


def _scored(pair: Any) -> tuple[int, float]:
    version, reward = pair
    return int(version), float(reward)


def _series(view: RunView, points: list[StepPoint]) -> dict[str, list[float | None]]:
    generated: list[float | None] = []
    trained: list[float | None] = []
    for index, point in enumerate(points):
        # Beats come once a second, so a rate over one short step would jump.
        before = points[max(0, index - SMOOTH_STEPS)]
        seconds = point.time_s - before.time_s
        whole = seconds > 0 and before.time_s >= view.started_s
        generated.append((point.generated - before.generated) / seconds if whole else None)
        window = points[max(0, index - SMOOTH_STEPS) + 1 : index + 1]
        trained.append(sum(p.tokens for p in window) / seconds if whole else None)
    out: dict[str, list[float | None]] = {
        "step": [float(point.step) for point in points],
        "seconds": [point.time_s - view.started_s for point in points],
        "reward": [point.reward for point in points],
        "response_length": [point.length for point in points],
        "staleness_mean": [point.staleness_mean for point in points],
        "staleness_max": [float(point.staleness_max) for point in points],
        "generated_per_s": generated,
        "trained_per_s": trained,
    }
    return out | {name: [point.metrics.get(name) for point in points] for name in METRICS_KEPT}


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Print it as tables."""
    console = console or Console()
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, value in _facts(summary):
        facts.add_row(name, value)
    console.print(f"\n[bold]{summary.run}[/]: {summary.steps} of {summary.steps_planned} steps", highlight=False)
    console.print(facts)
    total = sum(summary.staleness)
    if total:
        ages = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for heading in ("staleness of trained tokens", "", ""):
            ages.add_column(heading, no_wrap=True)
        for age, tokens in enumerate(summary.staleness):
            name = "on-policy" if age == 0 else f"{age} version{'s' if age > 1 else ''} old"
            ages.add_row(name, f"[cyan]{bar(tokens / total, 30)}[/]", f"{tokens / total:.1%}")
        console.print(ages)
    watched = [actor for actor in summary.actors if actor.idle_share is not None]
    if watched:
        actors = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for heading in ("actor", "idle", "waits mostly for"):
            actors.add_column(heading, no_wrap=True)
        for actor in watched:
            actors.add_row(actor.actor, f"{actor.idle_share:.0%}", actor.waits_for)
        console.print(actors)
    if summary.cpu_s:
        cpu = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        cpu.add_column("process of", no_wrap=True)
        cpu.add_column("CPU seconds", justify="right")
        for label, seconds in summary.cpu_s.items():
            cpu.add_row(label, f"{seconds:.1f}")
        console.print(cpu)


def _facts(summary: Summary) -> list[tuple[str, str]]:
    facts = [
        ("time", f"{summary.seconds:.0f} s"),
        (
            "reward",
            f"{_told(summary.reward_first, 3)} (first {EDGE_STEPS} steps) → {_told(summary.reward_last, 3)} (last)",
        ),
    ]
    if summary.evaluations:
        shown = summary.evaluations
        if len(shown) > EVALUATIONS_SHOWN:
            shown = [shown[0], *shown[1 - EVALUATIONS_SHOWN :]]
        told = " → ".join(f"{reward:.3f} (version {version})" for version, reward in shown)
        facts.append(("held-out reward", told))
    if summary.best is not None and len(summary.evaluations) > 1:
        version, reward = summary.best
        facts.append(("best version", f"{version}, held-out reward {reward:.3f}"))
    staleness = f"mean {summary.staleness_mean:.2f}, max {summary.staleness_max}, bound {summary.max_staleness}"
    rate = f"{_told(summary.generated_per_s)} tokens/s generated, {_told(summary.trained_per_s)} trained"
    facts += [("staleness", staleness), ("throughput", rate)]
    if summary.dropped:
        why = by_reason(summary.dropped)
        facts.append(("dropped", f"{samples(sum(summary.dropped.values()))} ({why}); `rollstream audit` has more"))
    facts += [(f"newest {reason}", escape(failure)) for reason, failure in summary.failures.items()]
    cpu = f"{summary.cpu_total_s:.1f} s, start-up included"
    if summary.cpu_per_step_s is not None:
        cpu += f"; {summary.cpu_per_step_s:.2f} s a batch of {summary.batch_samples} samples"
    facts.append(("CPU, all processes", cpu))
    return facts


def plot(summary: Summary, path: Path) -> None:
    """Draw it into a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}):
        figure = plt.figure(figsize=(14, 9.5), layout="constrained")
        figure.suptitle(f"{summary.run}: {summary.steps} steps in {summary.seconds:.0f} s")
        top, middle, bottom = figure.subfigures(3, 1, squeeze=False)[
            :, 0
        ]  # rows of their own, so that long labels widen no other row
        reward, staleness = top.subplots(1, 2, width_ratios=(2, 1))
        lengths, rates, ages = middle.subplots(1, 3)
        idle, cpu = bottom.subplots(1, 2)
        _draw_reward(reward, summary)
        _draw_staleness(staleness, summary)
        _draw_lines(lengths, summary, {"response_length": ""}, "mean response length", "tokens")
        names = {"generated_per_s": "generated", "trained_per_s": "trained"}
        _draw_lines(rates, summary, names, "throughput, all workers", "tokens/s")
        _draw_histogram(ages, summary)
        _draw_idle(idle, summary)
        _draw_cpu(cpu, summary)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _known(summary: Summary, name: str) -> tuple[list[float], list[float]]:
    """Steps done and values of a series, without the steps that have none."""
    pairs = [(step, value) for step, value in zip(summary.series["step"], summary.series[name], strict=True)]
    known = [(step + 1, value) for step, value in pairs if step is not None and value is not None]
    return [step for step, _ in known], [value for _, value in known]


def _draw_reward(axes: Axes, summary: Summary) -> None:
    steps, rewards = _known(summary, "reward")
    axes.plot(steps, rewards, color="tab:green", alpha=0.35, marker=".", lw=0.8, label="mean of the batch's samples")
    axes.plot(steps, running_mean(rewards, SMOOTH_STEPS), color="tab:green", lw=2.2, label=f"{SMOOTH_STEPS}-step mean")
    if summary.evaluations:
        versions = [version for version, _ in summary.evaluations]
        held_out = [reward for _, reward in summary.evaluations]
        small = len(versions) > EVALUATIONS_MARKED
        joined = 1.2 if len(versions) > 2 else 0.0  # a line through the first and the last would tell of all between
        size = 3 if small else 6
        axes.plot(versions, held_out, label="held-out problems", color="tab:orange", marker="D", ms=size, lw=joined)
        if summary.best is not None and len(versions) > 2:
            axes.plot(*summary.best, "*", color="tab:red", ms=15, label=f"best: version {summary.best[0]}")
        named = [*summary.evaluations[:1], *summary.evaluations[1:][-1:], *([summary.best] if summary.best else [])]
        for version, reward in dict(named).items():
            axes.annotate(f"{reward:.3f}", (version, reward), xytext=(6, -13), textcoords="offset points", fontsize=9)
    everything = rewards + [reward for _, reward in summary.evaluations]
    if everything and min(everything) >= 0 and max(everything) <= 1:
        axes.set_ylim(-0.02, 1.04)
    axes.set(title="reward", xlabel="step")
    _whole_steps(axes)
    axes.legend(loc="lower right", frameon=False)


def _draw_staleness(axes: Axes, summary: Summary) -> None:
    names = {"staleness_mean": "mean", "staleness_max": "oldest token"}
    _draw_lines(axes, summary, names, "staleness of trained tokens", "versions")
    axes.axhline(summary.max_staleness, color="tab:red", ls="--", lw=1, label=f"bound η = {summary.max_staleness}")
    bound = max(1, summary.max_staleness)
    axes.set_ylim(-0.05 * bound, 1.45 * bound)  # room for the legend above the bound
    axes.legend(loc="upper right", frameon=False, ncols=3)


def _draw_lines(axes: Axes, summary: Summary, names: dict[str, str], title: str, unit: str) -> None:
    for name, label in names.items():
        axes.plot(*_known(summary, name), label=label, lw=1.6)
    axes.set(title=title, xlabel="step", ylabel=unit)
    _whole_steps(axes)
    axes.set_ylim(bottom=0)
    if len(names) > 1:
        axes.legend(frameon=False)


def _draw_histogram(axes: Axes, summary: Summary) -> None:
    total = max(1, sum(summary.staleness))
    bars = axes.bar(range(len(summary.staleness)), [count / total for count in summary.staleness], color="tab:cyan")
    if len(bars) <= 10:
        axes.bar_label(bars, [f"{count / total:.1%}" for count in summary.staleness], fontsize=9)
        axes.set_xticks(range(len(summary.staleness)))
    axes.margins(y=0.12)
    axes.set(title="share of trained tokens by age", xlabel="versions old", ylabel="share")
    axes.grid(axis="x", visible=False)


def _draw_idle(axes: Axes, summary: Summary) -> None:
    actors = [actor for actor in reversed(summary.actors) if actor.idle_share is not None]
    names = [actor.actor for actor in actors]
    idle = [actor.idle_share or 0.0 for actor in actors]
    axes.barh(names, [1 - share for share in idle], color="#8fce8f", label="busy")
    axes.barh(names, idle, left=[1 - share for share in idle], color="#e8e8e8", label="idle")
    for place, actor in enumerate(actors):
        share = actor.idle_share or 0.0
        reason = f", waits for {actor.waits_for}" if actor.waits_for and share > 0.05 else ""
        axes.text(0.01, place, f"{share:.0%} idle{reason}", va="center", fontsize=9)
    axes.set(title="who was busy", xlabel="share of time", xlim=(0, 1))
    axes.grid(visible=False)


def _draw_cpu(axes: Axes, summary: Summary) -> None:
    labels = list(reversed(summary.cpu_s))
    bars = axes.barh(labels, [summary.cpu_s[label] for label in labels], color="tab:purple")
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    axes.margins(x=0.1)
    title = f"CPU seconds, start-up included: {summary.cpu_total_s:.0f} in all"
    if summary.cpu_per_step_s is not None:
        title += f"; {summary.cpu_per_step_s:.2f} a batch once running"
    axes.set(title=title, xlabel="CPU seconds")
    axes.grid(axis="y", visible=False)


def _whole_steps(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _told(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
