"""`rollstream sim`: many seeds in several processes, what they reached, and the failing ones made small."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from ops.sim.repeat import digests
from ops.sim.run import Outcome, simulate
from ops.sim.scenario import FAULTS, Scenario, draw, kind_of
from ops.sim.shrink import shrink
from schemas import UserError

TELL_EVERY_S: Final = 10.0
SHRUNK_MAX: Final = 5  # failing seeds that are made small; all are named
TAIL: Final = 40  # lines of a failing run's trace
CHUNK: Final = 4  # seeds given to a process at once
REPEATED: Final = 20  # seeds run again under several hash seeds


@dataclasses.dataclass(slots=True)
class Tally:
    """What the seeds so far came to. `faults` and `situations` count how often, `in_seeds` in how many seeds."""

    seeds: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    situations: Counter[str] = dataclasses.field(default_factory=Counter)
    in_seeds: Counter[str] = dataclasses.field(default_factory=Counter)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)

    def add(self, result: _Result) -> None:
        """Count one seed."""
        self.seeds += 1
        self.virtual_s += result.virtual_s
        self.cpu_s += result.cpu_s
        self.faults.update(result.faults)
        self.situations.update(result.situations)
        self.in_seeds.update({*result.faults, *result.situations})
        if result.violation:
            self.failed[result.seed] = result.violation


@dataclasses.dataclass(frozen=True, slots=True)
class _Result:
    """What a process tells of a seed."""

    seed: int
    violation: str
    faults: dict[str, int]
    situations: dict[str, int]
    virtual_s: float
    cpu_s: float


def _one(seed: int) -> _Result:
    begun_s = time.process_time()
    outcome = simulate(draw(seed))
    return _Result(
        seed,
        str(outcome.violations[0]) if outcome.violations else "",
        dict(Counter(map(kind_of, outcome.struck))),
        outcome.situations,
        outcome.virtual_s,
        time.process_time() - begun_s,
    )


def run_seeds(first: int, seeds: int, jobs: int, minutes: float | None, console: Console) -> Tally:
    """Run seeds from `first` on: `seeds` of them, or as many as the minutes allow."""
    tally, begun_s = Tally(), time.monotonic()
    told_s = begun_s
    for result in _results(first, seeds, jobs, begun_s + 60 * minutes if minutes else None):
        tally.add(result)
        if result.violation:
            console.print(f"seed {result.seed} failed: {result.violation}", style="red", markup=False, soft_wrap=True)
        if time.monotonic() - told_s >= TELL_EVERY_S:
            told_s = time.monotonic()
            rate = tally.seeds / (told_s - begun_s)
            of = "" if minutes else f" of {seeds}"
            console.print(f"{tally.seeds}{of} seeds, {rate:.1f} a second, {len(tally.failed)} failed")
    return tally


def _results(first: int, seeds: int, jobs: int, until_s: float | None) -> Iterator[_Result]:
    numbers = range(first, first + seeds) if until_s is None else range(first, 1 << 62)
    if jobs == 1:
        for seed in numbers:
            if until_s is not None and time.monotonic() > until_s:
                return
            yield _one(seed)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        at = iter(numbers)
        waiting: list[AsyncResult[list[_Result]]] = []
        while True:
            while len(waiting) < 2 * jobs and (until_s is None or time.monotonic() < until_s):
                chunk = [seed for _, seed in zip(range(CHUNK), at, strict=False)]
                if not chunk:
                    break
                waiting.append(pool.map_async(_one, chunk, chunksize=CHUNK))
            if not waiting:
                return
            yield from waiting.pop(0).get()


def main(first: int, seeds: int, jobs: int, minutes: float | None, regressions: Path | None) -> int:
    """Run many seeds, print what they reached, shrink what failed; 0 if every promise was kept."""
    console, begun_s = Console(highlight=False), time.monotonic()
    if regressions is not None and not regressions.exists():
        raise UserError(f"There is no file {regressions}.", "Make it, or leave out --regressions.")
    tally = run_seeds(first, seeds, jobs, minutes, console)
    _print(tally, time.monotonic() - begun_s, console)
    for seed in list(tally.failed)[:SHRUNK_MAX]:
        console.print(f"making seed {seed} small ...")
        small = shrink(simulate(draw(seed)))
        show(small, console, TAIL)
        if regressions is not None:
            note(small, regressions)
    same = digests(first, REPEATED)
    console.print(
        f"traces of {REPEATED} seeds in {len(same)} processes: "
        + ", ".join(f"PYTHONHASHSEED={hash_seed} {digest}" for hash_seed, digest in same.items())
    )
    if len(set(same.values())) > 1:
        console.print("THE SEEDS DO NOT REPEAT", style="red")
        return 1
    if tally.failed:
        console.print(f"{len(tally.failed)} of {tally.seeds} seeds BROKE A PROMISE", style="red")
        return 1
    console.print(f"all promises were kept in {tally.seeds} seeds")
    return 0


def replay(scenario: Scenario, trace: bool) -> int:
    """Run one scenario and show what happened; 0 if every promise was kept."""
    outcome = simulate(scenario, keep_trace=trace)
    show(outcome, Console(highlight=False), None if trace else TAIL if outcome.violations else 0)
    return 0 if outcome.clean else 1


def show(outcome: Outcome, console: Console, lines: int | None) -> None:
    """One run: its trace (the last lines, or all), its scenario, what it broke."""
    for line in outcome.trace if lines is None else outcome.trace[-lines:] if lines else ():
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"faults that struck: {', '.join(outcome.struck) or 'none'}", markup=False, soft_wrap=True)
    console.print(f"reached: {_counted(outcome.situations)}", markup=False, soft_wrap=True)
    console.print(f"{outcome.virtual_s:.1f} virtual seconds, trace {outcome.trace_hash}")
    for violation in outcome.violations[:3]:
        console.print(f"BROKEN {violation}", style="red", markup=False, soft_wrap=True)
    console.print(f"rollstream sim --scenario '{outcome.scenario.to_json()}'", markup=False, soft_wrap=True)


def note(outcome: Outcome, regressions: Path) -> None:
    """Add a failing scenario to a file, so that it is tried again for ever."""
    with regressions.open("a", encoding="utf-8") as file:
        file.write(f"# {outcome.violations[0]}\n{outcome.scenario.to_json()}\n")


def read_regressions(path: Path) -> list[Scenario]:
    """The scenarios in such a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Scenario.from_json(line) for line in lines if line.strip() and not line.startswith("#")]


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(counts.items())) or "nothing"


def _print(tally: Tally, seconds: float, console: Console) -> None:
    table = Table(title=f"{tally.seeds} seeds", title_justify="left")
    table.add_column("fault")
    table.add_column("struck", justify="right")
    table.add_column("in seeds", justify="right")
    for kind in FAULTS:
        table.add_row(f"{kind}: {FAULTS[kind]}", f"{tally.faults[kind]:,}", f"{tally.in_seeds[kind]:,}")
    console.print(table)
    table = Table(title="what was reached", title_justify="left")
    table.add_column("situation")
    table.add_column("times", justify="right")
    table.add_column("in seeds", justify="right")
    for situation, count in sorted(tally.situations.items()):
        table.add_row(situation, f"{count:,}", f"{tally.in_seeds[situation]:,}")
    console.print(table)
    console.print(
        f"{seconds:.0f} s, {tally.cpu_s:.0f} CPU-s ({tally.cpu_s / max(1, tally.seeds):.2f} a seed), "
        f"{tally.virtual_s / 3600:.1f} virtual hours"
    )
