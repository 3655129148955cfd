"""Two trainings on the same data, step by step: what the run recorded beside what a replay makes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EDGE_STEPS: Final = 5  # the last steps whose mean is told
ROWS_MAX: Final = 12  # steps in the printed table; the file has all
# Of `StepDone.metrics`, in the order in which they are told. `reward_mean` is of the batch's samples.
TOLD: Final = {
    "reward_mean": "reward of the batch",
    "advantage_abs": "mean |advantage|",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "clip_fraction": "clip fraction",
    "prox_kl": "KL(clip anchor ‖ current)",
    "mismatch_kl": "KL(behaviour ‖ clip anchor)",
    "behaviour_weight_mean": "importance weight, mean",
    "behaviour_weight_max": "importance weight, max",
    "ess": "effective sample size",
    "entropy": "entropy",
    "stale_masked_tokens": "tokens masked as too old",
    "lr": "learning rate",
}
BY_STEP: Final = ("loss", "grad_norm", "clip_fraction", "reward_mean", "entropy", "prox_kl")  # as many as fit
PAIR_WIDTH: Final = 23  # characters of two numbers side by side
# These, and all that begin with "seconds_", differ between machines.
TIMES: Final = ("seconds", "cpu_seconds", "time", "tokens_per_s", "idle_fraction")
CAVEAT: Final = (
    "The data are those of the recorded policy: its prompts, its answers, its selection. A replay shows what another "
    "loss makes of them, not what a run with it would have generated."
)


@dataclasses.dataclass(frozen=True, slots=True)
class ComparedStep:
    """One step's metrics, as recorded and as replayed, and the digests of the version that it made."""

    step: int
    recorded: Mapping[str, float]
    replayed: Mapping[str, float]
    recorded_digest: str
    replayed_digest: str

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))


def values(steps: Sequence[ComparedStep], name: str) -> tuple[list[float | None], list[float | None]]:
    """A metric by step, recorded and replayed; None where it is not told."""
    return [step.recorded.get(name) for step in steps], [step.replayed.get(name) for step in steps]


def largest_difference(steps: Sequence[ComparedStep]) -> tuple[str, float] | None:
    """The metric, times aside, that differs most between both, relative to its size; None if all are equal."""
    worst: tuple[str, float] | None = None
    for step in steps:
        for name in step.recorded.keys() & step.replayed.keys():
            if name in TIMES or name.startswith("seconds_"):
                continue
            one, other = step.recorded[name], step.replayed[name]
            share = abs(one - other) / max(abs(one), abs(other), 1e-12)
            if share > 0 and (worst is None or share > worst[1]):
                worst = name, share
    return worst


def print_comparison(steps: Sequence[ComparedStep], console: Console) -> None:
    """The means of all metrics, and the most asked-for ones step by step."""
    means = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    means.add_column("", no_wrap=True)
    tail = min(EDGE_STEPS, len(steps))
    for heading in (f"recorded, {len(steps)} steps", "replayed", f"recorded, last {tail}", "replayed"):
        means.add_column(heading, justify="right")
    for name, title in TOLD.items():
        old, new = values(steps, name)
        if _known(steps, name):
            means.add_row(title, *(_told(_mean(part)) for part in (old, new, old[-tail:], new[-tail:])))
    console.print(means)
    fitting = BY_STEP[: max(1, (console.width - 6) // PAIR_WIDTH)]
    by_step = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    by_step.add_column("step", justify="right")
    for name in fitting:
        by_step.add_column(TOLD[name], justify="left", no_wrap=True)
    for step in _spread(steps, ROWS_MAX):
        cells = [f"{_told(step.recorded.get(name)):>9} │ {_told(step.replayed.get(name)):<9}" for name in fitting]
        by_step.add_row(str(step.step), *cells)
    console.print("\nstep by step, recorded │ replayed", highlight=False)
    console.print(by_step)


def plot_comparison(steps: Sequence[ComparedStep], title: str, path: Path) -> None:
    """Both curves of every metric into a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    told = [
        name for name in TOLD if name != "lr" and any(v is not None for series in values(steps, name) for v in series)
    ]
    columns = 4
    rows = -(-len(told) // columns)
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}):
        figure, grid = plt.subplots(rows, columns, figsize=(16, 3 * rows), squeeze=False, layout="constrained")
        figure.suptitle(title)
        for axes, name in zip(grid.flat, told, strict=False):
            _draw(axes, steps, name)
        for axes in grid.flat[len(told) :]:
            axes.set_axis_off()
        grid.flat[0].legend(frameon=False)
        figure.savefig(path, dpi=100)
        plt.close(figure)


def _draw(axes: Axes, steps: Sequence[ComparedStep], name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    where = [step.step for step in steps]
    styles: tuple[dict[str, Any], ...] = (
        {"label": "recorded", "color": "0.75", "lw": 5},  # wide, so that it shows where both are the same
        {"label": "replayed", "color": "tab:red", "lw": 1.5, "marker": "." if len(steps) < 40 else None},
    )
    for series, style in zip(values(steps, name), styles, strict=True):
        known = [(step, value) for step, value in zip(where, series, strict=True) if value is not None]
        axes.plot([step for step, _ in known], [value for _, value in known], **style)
    axes.set(title=TOLD[name], xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _known(steps: Sequence[ComparedStep], name: str) -> bool:
    return any(value is not None for series in values(steps, name) for value in series)


def _spread(steps: Sequence[ComparedStep], most: int) -> list[ComparedStep]:
    """At most `most` of them, evenly, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _mean(series: Sequence[float | None]) -> float | None:
    known = [value for value in series if value is not None]
    return sum(known) / len(known) if known else None


def _told(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
