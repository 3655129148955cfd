"""`rollstream bench sandbox`: what it costs to run a program in the sandbox, beside a bare Python that runs the same.

The two take turns, program by program, in one run. A bare child is started when its program is there; a sandbox stands
ready, and is replaced while nobody waits. So the second table has them run without a pause, on all cores, where the
replacement has to be paid for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from actors.reward.sandbox import Limits, Sandbox
from actors.reward.sandbox.runtime import find_runtime
from ops.bench import describe_machine, publish, say

PROGRAMS = {
    "sum of two": "a, b = map(int, input().split())\nprint(a + b)",
    "heap and counter": "import heapq\nfrom collections import Counter\nx = list(map(int, input().split())) * 500\n"
    "heapq.heapify(x)\nprint(heapq.heappop(x), Counter(x).most_common(1))",
    "typing and cache": "from typing import List\nfrom functools import lru_cache\n@lru_cache(None)\n"
    "def f(n: int) -> int: return n if n < 2 else f(n - 1) + f(n - 2)\nx: List[int] = [f(90)]\nprint(x)",
    "json and re": "import json, re\nprint(json.dumps(re.findall('[0-9]+', input())))",
    "10 ms of work": "n = 0\nfor i in range(200000): n += i\nprint(n)",
}
STDIN = "2 3\n"
PAUSE_S = 0.15  # in which a sandbox is replaced
TIMEOUT_S = 60.0
BARE = ("python -I -S", "python")


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """Runs without a pause: how many a second, and CPU milliseconds of each, of all processes."""

    runs_s: float
    cpu_ms: float


async def bench_sandbox(rounds: int, seconds: float, out: Path | None) -> int:
    """Measure, print the tables, write them to `out`. Raises `UserError` where code cannot be isolated."""
    machine = describe_machine()
    cores = len(os.sched_getaffinity(0))
    latencies, rates = await asyncio.to_thread(_measure, rounds, seconds, cores)
    load = os.getloadavg()[0]
    publish(report(latencies, rates, f"{machine}; load at the end {load:.1f}", cores, rounds), out)
    return 0


def _measure(rounds: int, seconds: float, cores: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, Rate]]:
    with Sandbox(Limits(time_s=TIMEOUT_S), children=cores) as sandbox:
        say("in turns")
        latencies = _in_turns(sandbox, rounds)
        say("without a pause")
        rates = {name: _without_pause(run, cores, seconds) for name, run in _runners(sandbox).items()}
    return latencies, rates


def report(
    latencies: dict[str, dict[str, list[float]]], rates: dict[str, Rate], machine: str, cores: int, rounds: int
) -> str:
    """The result as Markdown."""
    lines = [
        "# What the sandbox costs",
        "",
        f"`rollstream bench sandbox` on {machine}.",
        "",
        f"Milliseconds from handing the program over to having what it printed, medians of {rounds} runs each, in "
        f"turns, with {PAUSE_S:g} s between runs. `{BARE[0]}` is the quickest start that Python has, without installed "
        f"packages; `{BARE[1]}` is what people start.",
        "",
        f"| program | sandbox | {BARE[0]} | {BARE[1]} | over {BARE[0]} |",
        "|---|--:|--:|--:|--:|",
    ]
    differences = []
    for program, of in latencies.items():
        medians = {name: 1000 * statistics.median(values) for name, values in of.items()}
        differences += [1000 * (a - b) for a, b in zip(of["sandbox"], of[BARE[0]], strict=True)]
        over = medians["sandbox"] - medians[BARE[0]]
        lines.append(
            f"| {program} | {medians['sandbox']:.1f} | {medians[BARE[0]]:.1f} | {medians[BARE[1]]:.1f} | {over:+.1f} |"
        )
    lines += [
        "",
        f"Median overhead over all pairs: **{statistics.median(differences):+.1f} ms**.",
        "",
        f"Without a pause, {cores} at once, each run in a fresh sandbox or a fresh process. The last column is what "
        f"{cores} cores do that have nothing else to do, by the CPU time of a run:",
        "",
        "| | runs/s | CPU ms a run | runs/s by CPU |",
        "|---|--:|--:|--:|",
        *(
            f"| {name} | {rate.runs_s:.1f} | {rate.cpu_ms:.1f} | {1000 * cores / rate.cpu_ms:.1f} |"
            for name, rate in rates.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _in_turns(sandbox: Sandbox, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by program and by who ran it."""
    runners = _runners(sandbox)
    found: dict[str, dict[str, list[float]]] = {name: {runner: [] for runner in runners} for name in PROGRAMS}
    for _ in range(rounds):
        for name, program in PROGRAMS.items():
            said = set()
            for runner, run in runners.items():
                time.sleep(PAUSE_S)
                began = time.perf_counter()
                said.add(run(program))
                found[name][runner].append(time.perf_counter() - began)
            assert len(said) == 1, f"{name} gave different outputs: {said}"
    return found


def _without_pause(run: Callable[[str], str], at_once: int, seconds: float) -> Rate:
    programs = list(PROGRAMS.values())
    before, began = _cpu_s(), time.perf_counter()
    counts = [0] * at_once

    def work(number: int) -> None:
        while time.perf_counter() - began < seconds:
            run(programs[counts[number] % len(programs)])
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    return Rate(sum(counts) / took, 1000 * (_cpu_s() - before) / sum(counts))


def _runners(sandbox: Sandbox) -> dict[str, Callable[[str], str]]:
    return {"sandbox": partial(_sandboxed, sandbox), **{name: partial(_bare, name) for name in BARE}}


def _sandboxed(sandbox: Sandbox, program: str) -> str:
    result = sandbox.run_blocking(program, STDIN)
    assert result.status == "ok", result
    return result.stdout


def _bare(name: str, program: str) -> str:
    flags = name.split()[1:]
    interpreter = str(find_runtime().interpreter) if flags else sys.executable
    done = subprocess.run(
        [interpreter, *flags, "-c", program],
        input=STDIN, capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    return done.stdout


def _cpu_s() -> float:
    """Of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
