"""`rollstream bench packing`: what packing sequences into shared rows saves, and that a step's memory is bounded.

Three ways to lay out the same sequences: packed, as the trainer does; a row each, sorted by length, each micro-batch
as wide as its longest; and a row each in the order in which they came, all as wide as the longest of the batch.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ops.bench import command, describe_machine, mean, publish, say
from ops.bench_packing_run import WAYS, Batches, Pass, Step, positions
from ops.host import initial_model
from ops.recipe import Recipe, load_recipe

MEBIBYTE = 1 << 20
COUNTS = (2, 4, 8, 16, 32)  # micro-batches of an optimizer step
STEP_LENGTH, STEP_ROWS = 128, 4  # tokens of each of their sequences, and sequences in each
TAIL_MEDIAN, TAIL_SIGMA, TAIL_MAX = 150, 1.2, 2000  # tokens: log-normal, cut off
TAIL_BATCHES, TAIL_SAMPLES, TAIL_MICRO_BATCH = 20, 64, 8192
SMALL_MICRO_BATCH = 1024  # tokens: several micro-batches to a mini-batch of the recipe
PASS_SAMPLES = 8  # of the harsher tail: padded to 2,000 tokens each they take a while


async def bench_packing(
    recipe: Path, overrides: Sequence[str], *, steps: int, warm: Path | None, out: Path | None
) -> int:
    """Measure, print the tables, write them to `out`. `warm` is a warm-started model; without it one is made.

    Raises `UserError` if a measurement fails.
    """
    machine = describe_machine()
    resolved = load_recipe(recipe, (*overrides, f"steps={steps}"))
    folder = Path(tempfile.mkdtemp(prefix="rollstream-bench-"))
    if warm is None:
        say("making the warm start")
        await command(("cli", "sft", str(recipe), *overrides, "--dir", str(folder / "warm")), folder / "warm.txt")
    model = str(warm or initial_model(folder / "warm"))
    say(f"training {steps} steps")
    real = Batches(**await _measured(folder, "batches", recipe=resolved.to_yaml(), model=model))
    # The fullest mini-batch: with the most samples its times say the most.
    fullest, budget = max(real.lengths, key=sum), resolved.trainer.micro_batch_tokens
    harsh = tail(TAIL_SAMPLES)
    passes = {
        resolved.name: (fullest, await _passes(folder, fullest, budget, model)),
        "small Llama, harsher tail": (
            harsh[:PASS_SAMPLES],
            await _passes(folder, harsh[:PASS_SAMPLES], TAIL_MICRO_BATCH, None),
        ),
    }
    grown = []
    for count in COUNTS:
        told = await _measured(folder, "step", micro_batches=count, length=STEP_LENGTH, rows=STEP_ROWS)
        grown.append(Step(**told))
        say(f"{count} micro-batches: {grown[-1].tensors / MEBIBYTE:.1f} MiB of tensors at most")
    publish(report(resolved, real, passes, grown, machine), out)
    shutil.rmtree(folder)  # it stays when something fails, to look into
    return 0


def tail(count: int, seed: int = 0) -> list[int]:
    """Lengths with a tail as that of answers that reason: most are short, a few as long as they may be."""
    drawn = np.random.default_rng(seed).lognormal(np.log(TAIL_MEDIAN), TAIL_SIGMA, count)
    return [int(length) for length in np.clip(drawn, 8, TAIL_MAX)]


async def _passes(folder: Path, lengths: list[int], micro_batch_tokens: int, model: str | None) -> dict[str, Pass]:
    found: dict[str, Pass] = {}
    for way in WAYS:
        told = {"lengths": lengths, "way": way, "micro_batch_tokens": micro_batch_tokens, "model": model}
        found[way] = Pass(**await _measured(folder, "pass", **told))
        say(f"{way}: {found[way].cpu_s:.3f} CPU seconds")
    return found


async def _measured(folder: Path, name: str, **told: Any) -> dict[str, Any]:
    asked, result = folder / "asked.json", folder / "result.json"
    asked.write_text(json.dumps(told))
    await command(("ops.bench_packing_run", name, str(asked), str(result)), folder / f"{name}.txt")
    read: dict[str, Any] = json.loads(result.read_text())
    return read


def report(
    recipe: Recipe,
    real: Batches,
    passes: dict[str, tuple[list[int], dict[str, Pass]]],
    grown: Sequence[Step],
    machine: str,
) -> str:
    """The result as Markdown."""
    lines = [
        "# Packing: padding, time and memory",
        "",
        f"`rollstream bench packing` on {machine}.",
        "",
        "The same sequences laid out in three ways. *Packed*: several share a row, as the trainer has it. *Sorted*: a "
        "row each, similar lengths together, each micro-batch as wide as its longest. *Padded*: a row each, as they "
        "come, all as wide as the longest of the mini-batch.",
        "",
        "## Padding",
        "",
        f"{recipe.name}: {len(real.padding)} steps of the plain loop, in which the reward went from "
        f"{mean(real.reward[:3]):.2f} to {mean(real.reward[-3:]):.2f}; samples with a gradient, "
        f"micro-batches of at most {recipe.trainer.micro_batch_tokens:,} tokens. The harsher tail: {TAIL_BATCHES} "
        f"batches of {TAIL_SAMPLES}, log-normal with median {TAIL_MEDIAN} and σ {TAIL_SIGMA}, cut at {TAIL_MAX:,} "
        "tokens. Share of all positions that hold no token, all batches together (the worst one):",
        "",
        "| lengths | mean | longest | " + " | ".join(WAYS) + " |",
        "|---|--:|--:|" + "--:|" * len(WAYS),
        _padding(recipe.name, real.lengths, recipe.trainer.micro_batch_tokens),
        _padding(f"the same, at most {SMALL_MICRO_BATCH:,} tokens", real.lengths, SMALL_MICRO_BATCH),
        _padding("harsher tail", [tail(TAIL_SAMPLES, seed) for seed in range(TAIL_BATCHES)], TAIL_MICRO_BATCH),
        "",
        f"The trainer's own metric `padding_fraction`, of a step with all its mini-batches: mean "
        f"{fmean(real.padding):.1%}, at most {max(real.padding):.1%}.",
        "",
        "## Time and memory of a pass",
        "",
        "Forward and backward over one mini-batch, each in a process of its own: CPU seconds (the quicker of two), "
        "live tensors at most (counted), and what the process grew by. The harsher tail runs through a Llama of 2 "
        "layers, 128 wide.",
        "",
        "| lengths | | positions | CPU-s | times packed | tensors, MiB | process, MiB |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, (lengths, ways) in passes.items():
        budget = recipe.trainer.micro_batch_tokens if name == recipe.name else TAIL_MICRO_BATCH
        for way in WAYS:
            one = ways[way]
            lines.append(
                f"| {name} | {way} | {positions(lengths, way, budget):,} | {one.cpu_s:.3f} "
                f"| {one.cpu_s / ways['packed'].cpu_s:.2f} | {one.tensors / MEBIBYTE:.1f} "
                f"| {one.resident / MEBIBYTE:.1f} |"
            )
    differences = [difference(ways) for _, ways in passes.values()]
    first, last = grown[0], grown[-1]
    lines += [
        "",
        f"It is the same loss and the same gradient: they differ by {max(differences):.0e} of their size at most.",
        "",
        "## Memory and the number of micro-batches",
        "",
        "A whole step of the learner (two optimizer steps, proximal logprobs, AdamW) on the same small Llama, each in "
        f"a process of its own: so many micro-batches of {STEP_ROWS} × {STEP_LENGTH} tokens to each optimizer step. "
        "The process had taken a step of one micro-batch before, and keeps that memory: what it grew by is beyond it.",
        "",
        "| micro-batches | tokens a step | tensors, MiB | process, MiB |",
        "|--:|--:|--:|--:|",
    ]
    for step in grown:
        tokens = 2 * step.micro_batches * STEP_ROWS * STEP_LENGTH
        lines.append(
            f"| {step.micro_batches} | {tokens:,} | {step.tensors / MEBIBYTE:.1f} | {step.resident / MEBIBYTE:.1f} |"
        )
    more = 2 * (last.micro_batches - first.micro_batches) * STEP_ROWS * STEP_LENGTH
    lines += [
        "",
        f"{last.micro_batches // first.micro_batches} times the tokens take {last.tensors / first.tensors:.3f} times "
        f"the memory. The rest is the tokens themselves with what the loss needs of each, "
        f"{(last.tensors - first.tensors) / more:.0f} bytes a token.",
    ]
    return "\n".join(lines) + "\n"


def _padding(name: str, batches: Sequence[Sequence[int]], micro_batch_tokens: int) -> str:
    told = []
    for way in WAYS:
        cost = [positions(lengths, way, micro_batch_tokens) for lengths in batches]
        of_each = [1 - sum(lengths) / each for lengths, each in zip(batches, cost, strict=True)]
        told.append(f"{1 - sum(map(sum, batches)) / sum(cost):.1%} ({max(of_each):.1%})")
    everything = [length for lengths in batches for length in lengths]
    return f"| {name} | {fmean(everything):.1f} | {max(everything):,} | {' | '.join(told)} |"


def difference(ways: dict[str, Pass]) -> float:
    """How far loss and gradient of the ways lie apart, relative to their size."""
    packed, *others = (np.array([ways[way].loss, *ways[way].gradient]) for way in WAYS)
    return max(float(np.linalg.norm(other - packed) / np.linalg.norm(packed)) for other in others)
