"""`rollstream bench cost`: CPU seconds that a batch costs, of all processes together, beside loops without a system.

All in one run, from one warm start, with the same rows, reward, batch and learning rate: the whole of Rollstream with
its log, its actors and nats-server; the plain synchronous loop of `ops.reference`, which does the same mathematics in
one process; and TRL's GRPOTrainer, if it is installed. Between the first batch and the last, so that start-up, which is
told beside it, counts for none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil

from bus.jetstream import JetStreamBus
from bus.table import STEPS
from ops.bench import LAST_STEPS, Lab, command, describe_machine, laboratory, mean, publish, say
from ops.bench_loops import Marks
from ops.launch import locate
from schemas import StepDone

LOOK_S = 0.05
REWARD_FUNCTIONS = "reward functions"
OTHERS = "fork server"
LAUNCHER = "launcher"


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What training came to: CPU and wall seconds and tokens a batch, CPU seconds until the first batch was trained.

    `reward` is the mean of the last batches. `parts` are the processes: (CPU seconds a batch, until the first batch).
    """

    name: str
    batch_cpu_s: float
    batch_s: float
    batch_tokens: float
    start_cpu_s: float
    reward: float
    parts: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds of each kind of process so far, at a Unix time."""

    time_s: float
    cpu_s: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """Of all processes."""
        return sum(self.cpu_s.values())


async def bench_cost(
    steps: int = 60, warm: Path | None = None, out: Path | None = None, folder: Path | None = None
) -> int:
    """Measure, print the tables, write them to `out`. `warm` is a warm-started model; without it one is made.

    What the runs leave is kept in `folder` if that is given. Raises `UserError` if one fails.
    """
    machine = describe_machine()
    with_trl = all(find_spec(name) for name in ("trl", "datasets"))
    async with laboratory(warm, folder) as lab:
        costs = [await loop_cost(lab, "plain", "plain loop", steps), await system_cost(lab, steps)]
        if with_trl:
            costs.append(await loop_cost(lab, "trl", "TRL GRPOTrainer", steps))
        else:
            say("TRL is not installed and is left out; to have it: pip install 'rollstream[bench]'")
        batch = lab.resolved().batch_samples
    publish(report(costs, steps, batch, machine), out)
    return 0


async def loop_cost(lab: Lab, loop: str, name: str, steps: int) -> Cost:
    """Train with one of the loops of `ops.bench_loops`."""
    recipe, result = lab.folder / f"{loop}.yaml", lab.folder / f"{loop}.json"
    recipe.write_text(lab.resolved(f"steps={steps}").to_yaml())
    await command(("ops.bench_loops", loop, str(recipe), str(lab.initial), str(result)), lab.folder / f"{loop}.txt")
    return _told(cost_of_marks(name, Marks(**json.loads(result.read_text()))))


def cost_of_marks(name: str, marks: Marks) -> Cost:
    """What the loop's own marks come to."""
    batches = len(marks.cpu_s) - 1
    return Cost(
        name,
        batch_cpu_s=(marks.cpu_s[-1] - marks.cpu_s[0]) / batches,
        batch_s=(marks.time_s[-1] - marks.time_s[0]) / batches,
        batch_tokens=mean(marks.tokens[1:]),
        start_cpu_s=marks.cpu_s[0],
        reward=mean(marks.reward[-LAST_STEPS:]),
    )


async def system_cost(lab: Lab, steps: int) -> Cost:
    """Run Rollstream, and look at its processes after the first step and after step `steps`."""

    # One step more than is counted: processes end with the last, and one that is on its way out cannot be read.
    summary, watched = await lab.run("rollstream", (f"steps={steps + 1}",), partial(readings, steps))
    assert watched is not None
    rewards = [reward for reward in summary.series["reward"] if reward is not None]
    tokens = summary.tokens_trained / summary.steps
    return _told(cost_of_readings("Rollstream, all processes", *watched, steps, tokens, mean(rewards[-LAST_STEPS:])))


def cost_of_readings(name: str, first: Reading, last: Reading, steps: int, tokens: float, reward: float) -> Cost:
    """What was used between the first step and the last, by kind of process, the largest first."""
    batches = steps - 1
    parts = first.cpu_s.keys() | last.cpu_s.keys()
    used = {part: (last.cpu_s.get(part, 0.0) - first.cpu_s.get(part, 0.0)) / batches for part in parts}
    return Cost(
        name,
        batch_cpu_s=(last.total_s - first.total_s) / batches,
        batch_s=(last.time_s - first.time_s) / batches,
        batch_tokens=tokens,
        start_cpu_s=first.total_s,
        reward=reward,
        parts={part: (used[part], first.cpu_s.get(part, 0.0)) for part in sorted(used, key=lambda part: -used[part])},
    )


async def readings(steps: int, folder: Path, pid: int) -> tuple[Reading, Reading]:
    """CPU seconds of a run's processes after its first step and after `steps` steps. `pid` is the launcher's."""
    while not (folder / "run.json").exists():
        await asyncio.sleep(LOOK_S)
    where = locate(folder, None, None)
    bus = JetStreamBus(where.run, where.url, "bench")
    await bus.connect()
    try:
        first: Reading | None = None
        async for entry in bus.read(STEPS):
            message = entry.message()
            assert isinstance(message, StepDone)
            if first is None:
                first = read_cpu(pid, folder)
            if message.step == steps - 1:
                return first, read_cpu(pid, folder)
        raise AssertionError("a stream has no end")
    finally:
        await bus.close()


def read_cpu(pid: int, folder: Path) -> Reading:
    """CPU seconds of the launcher and all that it started, by name; those that ended count for their parent."""
    names = {pid: LAUNCHER}
    for name, number in json.loads((folder / "processes.json").read_text()).items():
        names[int(number)] = name
    with contextlib.suppress(OSError, ValueError):
        names[int((folder / "nats" / "server.pid").read_text())] = "nats-server"
    cpu_s: dict[str, float] = {}
    root = psutil.Process(pid)
    processes = [root, *root.children(recursive=True)]  # parents before their children
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            above = names.get(process.ppid(), "")
            below = REWARD_FUNCTIONS if "reward-" in above or above == REWARD_FUNCTIONS else OTHERS
            name = names.setdefault(process.pid, below)
            times = process.cpu_times()
            ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            cpu_s[name] = cpu_s.get(name, 0.0) + times.user + times.system + ended
    return Reading(time.time(), cpu_s)


def _told(cost: Cost) -> Cost:
    say(f"{cost.name}: {cost.batch_cpu_s:.3f} CPU seconds a batch, start-up {cost.start_cpu_s:.1f}")
    return cost


def report(costs: Sequence[Cost], steps: int, batch: int, machine: str) -> str:
    """The result as Markdown. The first cost is the one that the others are compared with."""
    lines = [
        "# What a batch costs",
        "",
        f"`rollstream bench cost` on {machine}.",
        "",
        f"`recipes/running_total.yaml`, {steps} batches of {batch} samples from one warm start. CPU seconds, user and "
        "system, of all processes, from the first batch trained to the last; start-up is what was used until then.",
        "",
        f"| | CPU-s a batch | times the {costs[0].name} | wall-s a batch | tokens a batch | start-up CPU-s "
        f"| reward, last {LAST_STEPS} |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for cost in costs:
        lines.append(
            f"| {cost.name} | **{cost.batch_cpu_s:.3f}** | {cost.batch_cpu_s / costs[0].batch_cpu_s:.2f} "
            f"| {cost.batch_s:.3f} | {cost.batch_tokens:,.0f} | {cost.start_cpu_s:.1f} | {cost.reward:.3f} |"
        )
    for cost in costs:
        if cost.parts:
            lines += ["", f"{cost.name}, by process:", "", "| | CPU-s a batch | share | start-up CPU-s |"]
            lines.append("|---|--:|--:|--:|")
            for part, (seconds, start_s) in cost.parts.items():
                lines.append(f"| {part} | {seconds:.3f} | {seconds / cost.batch_cpu_s:.0%} | {start_s:.1f} |")
    return "\n".join(lines) + "\n"
