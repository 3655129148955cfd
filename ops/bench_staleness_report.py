"""What the staleness study tells: its tables, what they allow one to say, and the plot.

Differences are paired by seed: both runs of a pair begin with the same warm start and see the same prompts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from ops.bench_staleness_run import HELD_OUT_EVERY, Course
from ops.recipe import Recipe
from ops.view import running_mean

PLOT = Path("img") / "bench-staleness.png"  # beside the page
LAST_STEPS = 10
SMOOTH_STEPS = 5
LOSSES = ("naive", "decoupled")
# Student's t for an interval of 95 %, by the number of seeds.
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
SEEDS_MAX = max(T95)


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Values of one thing, one for each seed; NaN where it was not measured."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        """Their mean."""
        return fmean(self.values)

    @property
    def spread(self) -> float:
        """Their standard deviation; 0 of one."""
        if math.isnan(self.mean):
            return math.nan
        return stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def half_width(self) -> float:
        """Of the 95 % interval of the mean (Student's t); infinite for one seed."""
        count = len(self.values)
        return T95[count] * self.spread / math.sqrt(count) if count > 1 else math.inf

    @property
    def sign(self) -> int:
        """1 or −1 if the interval lies on one side of 0, else 0."""
        return int(math.copysign(1, self.mean)) if abs(self.mean) > self.half_width else 0

    def __sub__(self, other: Estimate) -> Estimate:
        return Estimate([a - b for a, b in zip(self.values, other.values, strict=True)])


Measure = Callable[[Course], float]


def over_the_run(course: Course) -> float:
    """Mean reward of all batches."""
    return fmean(course.series["reward"])


def of_the_last(course: Course) -> float:
    """Mean reward of the last batches."""
    return fmean(course.series["reward"][-LAST_STEPS:])


def held_out(course: Course) -> float:
    """Held-out reward of the last policy; NaN if none was measured."""
    return course.held_out[-1][1] if course.held_out else math.nan


def held_out_between(course: Course) -> float:
    """Mean held-out reward of the policies between the first and the last; NaN if none was measured."""
    between = [reward for _, reward in course.held_out[1:-1]]
    return fmean(between) if between else math.nan


MEASURES: dict[str, Measure] = {
    "over the run": over_the_run,
    f"last {LAST_STEPS} steps": of_the_last,
    "held-out, between": held_out_between,
    "held-out, at the end": held_out,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Study:
    """Runs by (staleness or its bound, loss, seed); every combination is there."""

    runs: Mapping[tuple[int, str, int], Course]

    @property
    def bounds(self) -> list[int]:
        """Ascending."""
        return sorted({bound for bound, _, _ in self.runs})

    @property
    def seeds(self) -> list[int]:
        """Ascending."""
        return sorted({seed for _, _, seed in self.runs})

    def of(self, bound: int, loss: str) -> list[Course]:
        """The runs of a kind, in the order of the seeds."""
        return [self.runs[bound, loss, seed] for seed in self.seeds]

    def estimate(self, bound: int, loss: str, measure: Measure) -> Estimate:
        """One number of each run of a kind."""
        return Estimate([measure(course) for course in self.of(bound, loss)])

    def delayed(self, bound: int) -> list[Course]:
        """The runs at staleness 0, later by so many steps: the rewards if age cost nothing but that samples are old."""
        return [
            Course({"reward": [rewards[max(0, step - bound)] for step in range(len(rewards))]}, course.held_out)
            for course in self.of(0, "decoupled")
            for rewards in [course.series["reward"]]
        ]


def report(exact: Study, live: Study, recipe: Recipe, machine: str, *, plotted: bool) -> str:
    """The page, as Markdown."""
    trainer, seeds = recipe.trainer, len(exact.seeds)
    lines = [
        "# What stale samples cost: naive and decoupled PPO",
        "",
        f"`rollstream bench staleness` on {machine}.",
        "",
        f"Recipe {recipe.name}, {recipe.steps} steps of {recipe.batch_samples} samples, {trainer.minibatches} "
        f"optimizer steps each, learning rate {trainer.lr:g}, clip {trainer.clip}; {seeds} seeds, each with a warm "
        "start that all its runs share. **Naive** PPO (`trainer.loss=ppo`) clips the ratio to the policy that sampled. "
        "**Decoupled** PPO (`decoupled_ppo`) clips the ratio to the weights before the step, and weighs each token by "
        "how far those have moved from the policy that sampled.",
        "",
        *(["![Reward by step](" + PLOT.as_posix() + ")", ""] if plotted else []),
        "## Every batch exactly η versions old",
        "",
        "The plain loop with the product's decoder, learner and losses. Mean ± standard deviation over the seeds.",
        "",
        *_rewards(exact, delayed=0 in exact.bounds),
        "",
        "Rewards of batches are those of the policy that sampled, η versions ago, so even learning that age does not "
        "disturb would show them η steps later. *Delayed* is that: the rewards at η = 0, later by η steps. Held-out "
        f"reward is the newest policy's, on {recipe.evaluation.count} problems, "
        f"{'greedily' if recipe.evaluation.greedy else 'sampled'}: *between* is the mean of those after every "
        f"{HELD_OUT_EVERY} steps.",
        "",
        *_differences(exact),
        "",
        *_verdicts(exact),
        "",
        "What the trainer saw, mean of all steps; the largest weight of all tokens of a run, mean over the seeds:",
        "",
        *_inside(exact),
    ]
    if live.runs:
        lines += [
            "",
            "## The whole system, filled to the bound",
            "",
            "Processes, log and interrupted generation as in any run, but `controller.pace=false` and so many workers "
            "that the trainer is what is waited for: samples then are nearly as old as the bound lets them be. Left to "
            "itself, with `pace: true`, the controller keeps them younger.",
            "",
            *_rewards(live, delayed=False),
            "",
            *_differences(live),
        ]
    return "\n".join(lines) + "\n"


def _rewards(study: Study, *, delayed: bool) -> list[str]:
    lines = ["| η | | staleness | " + " | ".join(MEASURES) + " |", "|--:|---|--:|" + "--:|" * len(MEASURES)]
    for bound in study.bounds:
        if delayed and bound:
            late = study.delayed(bound)
            told = [_told(Estimate([measure(course) for course in late])) for measure in (over_the_run, of_the_last)]
            lines.append(f"| {bound} | *delayed* | | {told[0]} | {told[1]} | | |")
        for loss in LOSSES:
            age = study.estimate(bound, loss, lambda course: fmean(course.series["staleness"]))
            told = [_told(study.estimate(bound, loss, measure)) for measure in MEASURES.values()]
            lines.append(f"| {bound} | {loss} | {age.mean:.2f} | " + " | ".join(told) + " |")
    return lines


def _told(estimate: Estimate) -> str:
    return "–" if math.isnan(estimate.mean) else f"{estimate.mean:.3f} ± {estimate.spread:.3f}"


def _differences(study: Study) -> list[str]:
    lines = [
        f"Decoupled − naive, paired by seed, with the 95 % interval that {len(study.seeds)} seeds allow; bold where it "
        "leaves 0 out:",
        "",
        "| η | " + " | ".join(MEASURES) + " |",
        "|--:|" + "--:|" * len(MEASURES),
    ]
    for bound in study.bounds:
        told = [_signed(_gain(study, bound, measure)) for measure in MEASURES.values()]
        lines.append(f"| {bound} | " + " | ".join(told) + " |")
    return lines


def _gain(study: Study, bound: int, measure: Measure) -> Estimate:
    return study.estimate(bound, "decoupled", measure) - study.estimate(bound, "naive", measure)


def _signed(estimate: Estimate) -> str:
    if math.isnan(estimate.mean):
        return "–"
    text = f"{estimate.mean:+.3f}" + (f" ± {estimate.half_width:.3f}" if len(estimate.values) > 1 else "")
    return f"**{text}**" if estimate.sign else text


def _verdicts(study: Study) -> list[str]:
    """What the seeds allow one to say, in sentences."""
    stale = [bound for bound in study.bounds if bound]
    lines = []
    for name, measure in MEASURES.items():
        gains = {bound: _gain(study, bound, measure) for bound in stale}
        better, worse = ([b for b, gain in gains.items() if gain.sign == sign] for sign in (1, -1))
        open_ = [b for b in stale if b not in better and b not in worse]
        clauses = [
            *([f"decoupled is better at {_etas(better)}"] if better else []),
            *([f"naive is better at {_etas(worse)}"] if worse else []),
            *([f"the seeds do not tell them apart at {_etas(open_)}"] if open_ else []),
        ]
        lines.append(f"- Reward {name}: {'; '.join(clauses)}.")
    if stale and 0 in study.bounds:
        for loss in LOSSES:
            lost = []
            for bound in stale:
                delayed = Estimate([over_the_run(course) for course in study.delayed(bound)])
                lost.append(f"{_signed(study.estimate(bound, loss, over_the_run) - delayed)} at η = {bound}")
            lines.append(f"- {loss.capitalize()} − delayed, over the run: {', '.join(lost)}.")
        noise = _gain(study, 0, over_the_run)
        lines.append(
            "- At η = 0 both are the same algorithm but for rounding. That they differ there by "
            f"{_signed(noise).strip('*')} over the run is what rounding alone does."
        )
    lines.append(
        f"- Of {len(MEASURES) * len(study.bounds)} intervals of 95 % one or two leave out 0 by chance: look at what "
        "holds for several η, and in one direction."
    )
    return lines


def _etas(bounds: Sequence[int]) -> str:
    return "η = " + ", ".join(map(str, bounds))


def _inside(study: Study) -> list[str]:
    lines = [
        "| η | | tokens clipped | tokens masked | largest weight | KL(sampled ‖ newest) | gradient norm |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for bound in study.bounds:
        for loss in LOSSES:
            courses = study.of(bound, loss)
            clipped, masked, drift, norm = (
                fmean(fmean(course.series[name]) for course in courses)
                for name in ("clip_fraction", "masked_fraction", "mismatch_kl", "grad_norm")
            )
            largest = fmean(max(course.series["behaviour_weight_max"]) for course in courses)
            weighs = loss == "decoupled"
            weights = f"{masked:.2%} | {largest:.2f}" if weighs else "– | –"
            lines.append(f"| {bound} | {loss} | {clipped:.1%} | {weights} | {drift:.4f} | {norm:.2f} |")
    return lines


def plot(exact: Study, path: Path) -> None:
    """Reward by step for each η, naive and decoupled side by side, and the mean over the run by η, as a PNG."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    *panels, summary = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
    colours = [mpl.colormaps["viridis"](0.92 * k / max(1, len(exact.bounds) - 1)) for k in range(len(exact.bounds))]
    for axes, loss in zip(panels, LOSSES, strict=True):
        for bound, colour in zip(exact.bounds, colours, strict=True):
            smooth = [running_mean(list(course.series["reward"]), SMOOTH_STEPS) for course in exact.of(bound, loss)]
            steps = range(1, len(smooth[0]) + 1)
            at_each = list(zip(*smooth, strict=True))
            axes.fill_between(
                steps, [min(v) for v in at_each], [max(v) for v in at_each], color=colour, alpha=0.15, lw=0
            )
            axes.plot(steps, [fmean(v) for v in at_each], color=colour, lw=2, label=f"η = {bound}")
        axes.set(title=f"{loss} PPO: reward by step", xlabel="training step", ylim=(0, 1))
    panels[0].set_ylabel(f"reward of the batch, {SMOOTH_STEPS}-step mean\n(line: mean of the seeds, band: all of them)")
    panels[1].legend(loc="lower right", frameon=False, title="each batch's age")
    places = range(len(exact.bounds))
    shown = [(loss, [exact.estimate(bound, loss, over_the_run) for bound in exact.bounds]) for loss in LOSSES]
    if 0 in exact.bounds:
        shown.append(("η = 0, delayed", [Estimate([over_the_run(c) for c in exact.delayed(b)]) for b in exact.bounds]))
    styles = (("#D55E00", "s", "-"), ("#0072B2", "o", "-"), ("#777777", "", "--"))
    for (name, estimates), (plain, marker, line) in zip(shown, styles, strict=False):
        means, spreads = [e.mean for e in estimates], [e.spread for e in estimates]
        summary.errorbar(places, means, spreads, color=plain, marker=marker, ls=line, lw=2, capsize=3, label=name)
    summary.set(title="reward, mean over the run", xlabel="η, versions", ylim=(0, 1))
    summary.set_xticks(list(places), [str(bound) for bound in exact.bounds])
    summary.legend(loc="lower left", frameon=False)
    for axes in (*panels, summary):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
