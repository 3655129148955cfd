"""`rollstream bench async`: what generating and training at the same time is worth, in wall time per step.

One recipe, one warm start, the same processes; only the staleness bound differs, and the order of the runs is turned
around, so that a machine that grows busier or hotter favours neither. Once with the recipe's own reward, which takes no
time, and once with one that takes as long as running the tests of a piece of code.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ops.host import initial_model
from ops.recipe import Recipe, load_recipe
from ops.summary import Summary
from schemas import UserError

T = TypeVar("T")

BOUNDS = (0, 4)  # η: synchronous, and the recipe's
LAST_STEPS = 5
WATCH_TIMEOUT_S = 10.0
OUTPUT_TAIL_LINES = 15
LOOK_S = 1.0
BUSY = 0.1  # a share of the machine beyond which times are not worth much


@dataclasses.dataclass(frozen=True, slots=True)
class Reward:
    """A kind of reward: its name in the table, and what it changes in the recipe."""

    name: str
    overrides: tuple[str, ...] = ()


QUICK = Reward("no time")
# A process is busy with one sample at a time, as with real tests. A sample takes steps there by its nature, so the pace
# is told to put up with older tokens than it would by default: several batches are under way at η = 4.
SLOW = Reward("0.2 to 2 s", ("reward.function=ops.slow_reward:reward", "reward.children=256", "controller.pace_age=3"))
ONE_WAVE = "rollout.slots=128"  # the whole batch at once: what suits the synchronous run best
PLAN = ((QUICK, 0), (QUICK, 4), (SLOW, 4), (SLOW, 0), (QUICK, 4), (QUICK, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """What one run came to, in its second half: wall seconds a step, mean staleness of the trained tokens in versions,
    mean tokens of an answer. `reward` is the mean of the last steps.
    """

    reward_kind: Reward
    bound: int
    step_s: float
    staleness: float
    length: float
    reward: float


async def bench_async(
    steps: int = 40, slow_steps: int = 30, warm: Path | None = None, out: Path | None = None, folder: Path | None = None
) -> int:
    """Measure, print the table, write it to `out`. `warm` is a warm-started model; without it one is made.

    `steps` are those of a run with the quick reward, `slow_steps` of one with the slow one; the second half counts.
    What the runs leave is kept in `folder` if that is given. Raises `UserError` if a run fails.
    """
    machine = describe_machine()
    async with laboratory(warm, folder) as lab:
        timings = []
        for number, (kind, bound) in enumerate(PLAN):
            timing = await measure(lab, f"run-{number}", kind, bound, slow_steps if kind is SLOW else steps)
            say(f"reward {kind.name}, η = {bound}: {timing.step_s:.3f} s a step, staleness {timing.staleness:.2f}")
            timings.append(timing)
    publish(report(timings, steps, slow_steps, machine), out)
    return 0


async def measure(lab: Lab, name: str, kind: Reward, bound: int, steps: int) -> Timing:
    """One run of so many steps under a staleness bound."""
    changes = (*kind.overrides, ONE_WAVE, f"controller.max_staleness={bound}", f"steps={steps}")
    summary, _ = await lab.run(name, changes)
    return steady(summary, kind, bound)


def steady(summary: Summary, kind: Reward, bound: int) -> Timing:
    """The second half of a run. In the first one processes start, the pace is found, and the pipeline fills."""
    times, ages, lengths, rewards = (
        [value for value in summary.series[name] if value is not None]
        for name in ("seconds", "staleness_mean", "response_length", "reward")
    )
    first = len(times) // 2
    return Timing(
        kind,
        bound,
        step_s=(times[-1] - times[first - 1]) / (len(times) - first),
        staleness=mean(ages[first:]),
        length=mean(lengths[first:]),
        reward=mean(rewards[-LAST_STEPS:]),
    )


def report(timings: Sequence[Timing], steps: int, slow_steps: int, machine: str) -> str:
    """The result as Markdown."""
    lines = [
        "# What asynchrony is worth",
        "",
        f"`rollstream bench async` on {machine}.",
        "",
        f"`recipes/running_total.yaml` with `{ONE_WAVE}`: one warm start, batches of 128 samples, the same processes; "
        f"only the staleness bound η differs. Wall seconds a step over the second half of {steps} steps ({slow_steps} "
        "with the slow reward), when the pipeline has filled; several runs of a kind are averaged.",
        "",
        f"| a reward takes | η | seconds a step | faster by | staleness | answer tokens | reward, last {LAST_STEPS} |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in (QUICK, SLOW):
        of_kind = {bound: [t for t in timings if t.reward_kind is kind and t.bound == bound] for bound in BOUNDS}
        step_s = {bound: mean([t.step_s for t in runs]) for bound, runs in of_kind.items()}
        for bound, runs in of_kind.items():
            each = " and ".join(f"{t.step_s:.3f}" for t in runs)
            told = f"{step_s[bound]:.3f}" + (f" ({each})" if len(runs) > 1 else "")
            factor = "" if bound == 0 else f"**{step_s[0] / step_s[bound]:.2f}**"
            means = (mean([getattr(t, name) for t in runs]) for name in ("staleness", "length", "reward"))
            staleness, length, reward = means
            lines.append(
                f"| {kind.name} | {bound} | {told} | {factor} | {staleness:.2f} | {length:.1f} | {reward:.3f} |"
            )
    return "\n".join(lines) + "\n"


# ---- what the benchmarks share


@dataclasses.dataclass(frozen=True, slots=True)
class Lab:
    """A folder with one warm start, where the default recipe is run from it, each time in processes of its own."""

    folder: Path
    recipe: Path
    initial: Path

    def resolved(self, *overrides: str) -> Recipe:
        """The recipe as its runs have it, with changes."""
        return load_recipe(self.recipe, (*_from(self.initial), "evaluation.count=0", *overrides))

    async def run(
        self,
        name: str,
        overrides: Sequence[str],
        watch: Callable[[Path, int], Coroutine[Any, Any, T]] | None = None,
    ) -> tuple[Summary, T | None]:
        """Run the recipe as a user would; returns its summary, and what `watch(run folder, pid)` returns meanwhile.

        Raises `UserError` if it fails, with the end of what it printed.
        """
        folder = self.folder / name
        shutil.copytree(self.initial, initial_model(folder))
        changes = (*_from(self.initial), "evaluation.count=0", *overrides)
        arguments = ("cli", "run", str(self.recipe), *changes, "--dir", str(folder), "--plain")
        watched = await command(arguments, self.folder / f"{name}.txt", partial(watch, folder) if watch else None)
        return Summary.from_json((folder / "summary.json").read_text()), watched


@contextlib.asynccontextmanager
async def laboratory(warm: Path | None, folder: Path | None) -> AsyncIterator[Lab]:
    """The default recipe's warm start, made or copied, in `folder` or in one that goes away at the end.

    A folder of its own stays when something fails, to look into.
    """
    import recipes

    recipe = Path(recipes.__path__[0]) / "running_total.yaml"
    if folder is not None and folder.exists():
        raise UserError(f"{folder} exists.", "Give another --dir.")
    place = folder or Path(tempfile.mkdtemp(prefix="rollstream-bench-"))
    place.mkdir(parents=True, exist_ok=True)
    say("making the warm start" if warm is None else f"taking {warm} as the warm start")
    changes = () if warm is None else _from(warm.resolve())
    await command(("cli", "sft", str(recipe), *changes, "--dir", str(place / "warm")), place / "warm.txt")
    yield Lab(place, recipe, initial_model(place / "warm"))
    if folder is None:
        shutil.rmtree(place)


def _from(model: Path) -> tuple[str, ...]:
    return (f"model={{path: '{model}'}}", "sft=null")


async def command(
    module: Sequence[str], output: Path, watch: Callable[[int], Coroutine[Any, Any, T]] | None = None
) -> T | None:
    """Run `python -m MODULE ARGUMENTS...` to its end; returns what `watch(pid)` returns meanwhile.

    Raises `UserError` if it fails, with the end of what it printed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *module, stdout=file, stderr=asyncio.subprocess.STDOUT, env=environment
        )
        watching = asyncio.create_task(watch(process.pid)) if watch else None
        try:
            status = await process.wait()
            if status == 0:
                return await asyncio.wait_for(watching, WATCH_TIMEOUT_S) if watching else None
        finally:
            if watching:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            if process.returncode is None:
                process.terminate()
                await process.wait()
    tail = "\n  ".join(output.read_text(errors="replace").splitlines()[-OUTPUT_TAIL_LINES:])
    raise UserError(f"`{' '.join(module)}` ended with status {status}.", f"The end of {output}:\n  {tail}")


def describe_machine() -> str:
    """Cores, processor, system, torch, and how busy the machine is already: it takes a second to look."""
    from importlib.metadata import version

    busy = psutil.cpu_percent(interval=LOOK_S) / 100
    if busy > BUSY:
        say(f"this machine is {busy:.0%} busy with something else: the times below say little")
    cores = f"{psutil.cpu_count()} cores ({_processor()})"
    return f"{cores}, {platform.system()}, torch {version('torch')}, {busy:.0%} busy before"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def publish(text: str, out: Path | None) -> None:
    """Print a report, and write it to `out`."""
    say("\n" + text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


def say(text: str) -> None:
    """Tell the person at the terminal."""
    print(text, flush=True)


def mean(values: Sequence[float]) -> float:
    """Their mean; 0 of none."""
    return sum(values) / len(values) if values else 0.0
