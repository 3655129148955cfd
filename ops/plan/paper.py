"""`python -m ops.plan.paper`: the settings of arXiv 2505.24298 in the model, beside the paper's numbers.

Nothing is fitted to them: the speeds are the presets, the lengths one assumption for all models (`LENGTHS`). Writes
`docs/plan-paper.md` and `docs/img/plan-paper.png`; takes some minutes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actors.controller.config import ControllerConfig
from ops.plan.baselines import BatchSchedule, one_step_overlap, synchronous
from ops.plan.cluster import Workload
from ops.plan.engine import OnUpdate
from ops.plan.hardware import Hardware, load_hardware
from ops.plan.lengths import Lengths, parse_lengths
from ops.plan.outcome import Outcome, simulate
from ops.plan.report import quantity, share
from ops.plan.search import make_plan

# 8,192 samples a step and 128,700 tokens/s at 590 s a step, as the paper has them, are 9,300 tokens a sample.
LENGTHS = "mean=9400,p95=24000,max=27648,prompt=256"
GROUPS, GROUP_SIZE = 512, 16  # table 3 of the paper
ROLLOUT_SHARE = 0.75  # section 7.1
BOUNDS = (0, 1, 2, 4, 8, 16)
DEVICES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
LINEAR_FROM = 32  # devices
SCALED_MODELS = ("1.5b", "7b", "32b")
HOUR_S = 3600.0
INTERRUPTED: tuple[OnUpdate, OnUpdate] = ("recompute", "drain")


@dataclasses.dataclass(frozen=True)
class EndToEnd:
    """A row of table 1 of the paper: devices, η, steps, and hours of Sync.AReaL, of verl and of AReaL."""

    model: str
    devices: int
    bound: int
    steps: int
    sync_hours: float
    verl_hours: float
    async_hours: float


TABLE_1 = (
    EndToEnd("1.5b", 128, 8, 250, 41.0, 33.6, 14.8),
    EndToEnd("7b", 192, 8, 250, 57.7, 52.1, 25.4),
    EndToEnd("14b", 256, 4, 80, 48.8, 44.4, 21.9),
    EndToEnd("32b", 384, 4, 60, 51.1, 46.4, 31.1),
)
FIGURE_5C = {0: 128.7, 1: 269.3, 2: 356.6, 4: 356.6, 8: 371.7, 16: 382.4}  # thousand tokens/s, 1.5B
FIGURE_6B = {"1.5b": (231.0, 207.0), "7b": (130.0, 111.0)}  # thousand tokens/s generated: interruptible, and not
FIGURE_6B_ROLLOUT = (
    24  # of 32 devices; with as many trainer devices, generation is the limit, which is what is measured
)


def workload(bound: int, lengths: Lengths, on_update: OnUpdate = "recompute") -> Workload:
    """The paper's batch under a bound; the controller is as production has it, but fills up to the bound, as theirs."""
    return Workload(
        lengths,
        ControllerConfig(batch_groups=GROUPS, group_size=GROUP_SIZE, max_staleness=bound, pace=False),
        on_update=on_update,
    )


def split_of(devices: int, engine_devices: int) -> tuple[int, int]:
    """Three quarters of the devices for rollout, in whole engines."""
    rollout = max(1, int(devices * ROLLOUT_SHARE) // engine_devices) * engine_devices
    return rollout, devices - rollout


@dataclasses.dataclass(frozen=True)
class Compared:
    """One setting under three schedules."""

    synchronous: BatchSchedule
    overlap: BatchSchedule
    asynchronous: Outcome

    @property
    def speedup(self) -> float:
        """Of asynchronous over synchronous, in trained tokens a second."""
        return self.asynchronous.tokens_per_s / self.synchronous.tokens_per_s

    @property
    def overlap_speedup(self) -> float:
        """Of one step of overlap over synchronous."""
        return self.overlap.tokens_per_s / self.synchronous.tokens_per_s


def compare(
    hardware: Hardware, devices: int, bound: int, lengths: Lengths, split: tuple[int, int] | None = None
) -> Compared:
    """Simulate one setting, with the paper's split where no other is given."""
    speeds = hardware.speeds_for(lengths)
    rollout, train = split or split_of(devices, speeds.engine_devices)
    load = workload(bound, lengths)
    return Compared(
        synchronous(speeds, load, devices),
        one_step_overlap(speeds, load, rollout // speeds.engine_devices, train),
        simulate(speeds, load, rollout, train),
    )


# ---- the tables


def end_to_end(lengths: Lengths, say: Callable[[str], None]) -> list[str]:
    """Table 1."""
    lines = [
        "| model, devices, η | sync: s a step, ours | paper | async 75:25: s a step, ours | paper | "
        "**speed-up, ours** | **paper** | best split | speed-up with it | one-step overlap, ours |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in TABLE_1:
        say(f"table 1: {row.model}")
        hardware = load_hardware(f"h800-{row.model}")
        found = compare(hardware, row.devices, row.bound, lengths)
        plan = make_plan(
            hardware.speeds_for(lengths), workload(row.bound, lengths), row.devices, (row.bound,), row.bound
        )
        step_s = row.sync_hours * HOUR_S / row.steps, row.async_hours * HOUR_S / row.steps
        lines.append(
            f"| {row.model.upper()}, {row.devices}, {row.bound} | {found.synchronous.step_s:.0f} | {step_s[0]:.0f} | "
            f"{found.asynchronous.step_s:.0f} | {step_s[1]:.0f} | **{found.speedup:.2f}** | "
            f"**{row.sync_hours / row.async_hours:.2f}** | {plan.best.rollout}:{plan.best.train} | "
            f"{plan.speedup(plan.bounds[0]):.2f} | {found.overlap_speedup:.2f} |"
        )
    return lines


def bounds(lengths: Lengths, say: Callable[[str], None]) -> tuple[list[str], list[Outcome]]:
    """Figure 5c."""
    speeds = load_hardware("h800-1.5b").speeds_for(lengths)
    outcomes = []
    for bound in BOUNDS:
        say(f"figure 5c: η = {bound}")
        outcomes.append(simulate(speeds, workload(bound, lengths), *split_of(128, 1)))
    lines = [
        "| η | trained tokens/s, ours | over η = 0 | masked ones counted | paper, thousand/s | over η = 0 | "
        "staleness, ours | masked | rollout idle | trainer idle |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    first = outcomes[0]
    for outcome in outcomes:
        paper = FIGURE_5C[outcome.max_staleness]
        more = outcome.tokens_per_s / first.tokens_per_s
        lines.append(
            f"| {outcome.max_staleness} | {quantity(outcome.tokens_per_s)} | {more:.2f} | "
            f"{consumed(outcome) / consumed(first):.2f} | {paper} | {paper / FIGURE_5C[0]:.2f} | "
            f"{outcome.staleness:.1f} | {share(outcome.masked)} | {share(outcome.rollout_idle)} | "
            f"{share(outcome.trainer_idle)} |"
        )
    return lines, outcomes


def consumed(outcome: Outcome) -> float:
    """Tokens in trained batches a second, masked ones too: what the paper counts, since it masks none."""
    return outcome.tokens_per_s / (1 - outcome.masked)


def interruption(lengths: Lengths, say: Callable[[str], None]) -> list[str]:
    """Figure 6b."""
    lines = [
        "| model | generated tokens/s, interrupted | drained first | gain, ours | paper: interrupted | not | gain |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for model, (paper, paper_not) in FIGURE_6B.items():
        say(f"figure 6b: {model}")
        speeds = load_hardware(f"h800-{model}").speeds_for(lengths)
        ours, drained = (
            simulate(speeds, workload(8, lengths, on_update), FIGURE_6B_ROLLOUT, FIGURE_6B_ROLLOUT).generated_per_s
            for on_update in INTERRUPTED
        )
        lines.append(
            f"| {model.upper()} | {quantity(ours)} | {quantity(drained)} | {ours / drained - 1:+.0%} | "
            f"{paper:.0f}k | {paper_not:.0f}k | {paper / paper_not - 1:+.0%} |"
        )
    return lines


def scaling(lengths: Lengths, say: Callable[[str], None]) -> tuple[list[str], dict[str, list[tuple[int, Compared]]]]:
    """Figure 4: the batch stays, the devices grow."""
    lines = [
        "| model | devices | async, trained tokens/s | of linear from 32 | sync | speed-up | one-step overlap | "
        "staleness | masked |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    found: dict[str, list[tuple[int, Compared]]] = {}
    for model in SCALED_MODELS:
        hardware = load_hardware(f"h800-{model}")
        found[model] = []
        for devices in DEVICES:
            if devices < 2 * hardware.engine_devices:
                continue
            say(f"figure 4: {model} on {devices}")
            found[model].append((devices, compare(hardware, devices, 16, lengths)))
        alone = synchronous(hardware.speeds_for(lengths), workload(0, lengths), hardware.engine_devices)
        lines.append(
            f"| {model.upper()} | {hardware.engine_devices} | – | – | {quantity(alone.tokens_per_s)} | – | – | – | – |"
        )
        first_devices, first = next(pair for pair in found[model] if pair[0] == LINEAR_FROM)
        for devices, compared in found[model]:
            rate = compared.asynchronous.tokens_per_s
            linear = rate / first.asynchronous.tokens_per_s / (devices / first_devices)
            lines.append(
                f"| {model.upper()} | {devices} | {quantity(rate)} | {linear:.0%} | "
                f"{quantity(compared.synchronous.tokens_per_s)} | {compared.speedup:.2f} | "
                f"{compared.overlap_speedup:.2f} | {compared.asynchronous.staleness:.1f} | "
                f"{share(compared.asynchronous.masked)} |"
            )
    return lines, found


def sensitivity(lengths: Lengths, say: Callable[[str], None]) -> list[str]:
    """How much each assumption matters for the headline: 1.5B on 128 devices, η = 8."""
    hardware = load_hardware("h800-1.5b")
    assert hardware.efficiency is not None
    changes: list[tuple[str, Hardware, Lengths]] = [("as in the preset", hardware, lengths)]
    for name, values in (
        ("step_overhead_s", (0.002, 0.01, 0.02)),
        ("bandwidth", (0.5, 0.9)),
        ("train", (0.2, 0.3, 0.5)),
        ("slots_max", (128,)),
    ):
        for value in values:
            changed = hardware.efficiency.model_copy(update={name: value})
            changes.append((f"{name} {value}", hardware.model_copy(update={"efficiency": changed}), lengths))
    changes.append(("reshard_s 0", hardware.model_copy(update={"reshard_s": 0.0}), lengths))
    for text in ("mean=9400,p95=18000,max=27648", "mean=6000,p95=20000,max=27648", "fixed=9400"):
        changes.append((f"lengths {text}", hardware, parse_lengths(f"{text},prompt=256")))
    lines = [
        "| assumption | sync, s a step | async 96:32, s a step | masked | speed-up | one-step overlap |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, of, drawn in changes:
        say(f"sensitivity: {name}")
        found = compare(of, 128, 8, drawn)
        lines.append(
            f"| {name} | {found.synchronous.step_s:.0f} | {found.asynchronous.step_s:.0f} | "
            f"{share(found.asynchronous.masked)} | {found.speedup:.2f} | {found.overlap_speedup:.2f} |"
        )
    return lines


# ---- the page


def main(folder: Path) -> None:
    """Simulate everything and write page and plot below `folder`."""
    lengths = parse_lengths(LENGTHS)
    say = _say
    table_1 = end_to_end(lengths, say)
    figure_5c, outcomes = bounds(lengths, say)
    figure_6b = interruption(lengths, say)
    figure_4, scaled = scaling(lengths, say)
    swept = sensitivity(lengths, say)
    draw(outcomes, scaled, folder / "img" / "plan-paper.png")
    tables = {
        "table_1": table_1, "figure_5c": figure_5c, "figure_6b": figure_6b, "figure_4": figure_4, "sensitivity": swept,
    }  # fmt: skip
    page = folder / "plan-paper.md"
    text = page.read_text(encoding="utf-8")
    for name, lines in tables.items():
        text = put(text, name, lines)
    page.write_text(text, encoding="utf-8")


def put(text: str, name: str, lines: Sequence[str]) -> str:
    """Replace what stands between the page's marks of this name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"the page has no marks {begin.strip()} and {end}")
    return before + begin + "\n".join(lines) + "\n" + end + after


def draw(outcomes: Sequence[Outcome], scaled: dict[str, list[tuple[int, Compared]]], path: Path) -> None:
    """η on the left, devices on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = [str(bound) for bound in BOUNDS]
    left.plot(names, [consumed(outcome) / consumed(outcomes[0]) for outcome in outcomes], marker="o", label="the model")
    left.plot(names, [FIGURE_5C[bound] / FIGURE_5C[0] for bound in BOUNDS], marker="s", label="the paper, figure 5c")
    left.set(xlabel="η", ylabel="throughput, in that of η = 0", title="1.5B, 96:32 devices", ylim=(0, None))
    left.legend()
    for model, points in scaled.items():
        devices = [count for count, _ in points]
        rates = [compared.asynchronous.tokens_per_s for _, compared in points]
        linear = rates[devices.index(LINEAR_FROM)] / LINEAR_FROM
        (line,) = right.plot(devices, rates, marker="o", label=f"{model.upper()}, asynchronous")
        style: dict[str, Any] = {"color": line.get_color()}
        right.plot(devices, [compared.synchronous.tokens_per_s for _, compared in points], linestyle="--", **style)
        right.plot(devices, [linear * count for count in devices], linestyle=":", alpha=0.5, **style)
    right.set(xscale="log", yscale="log", xlabel="devices", ylabel="trained tokens/s")
    right.set_title("dashed: synchronous, dotted: linear")
    right.set_xticks(DEVICES, [str(count) for count in DEVICES])
    right.minorticks_off()
    right.legend()
    figure.savefig(path, dpi=110)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path("docs"))
