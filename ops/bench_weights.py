"""`rollstream bench weights`: what deltas save on a real model, and what the bus's road for weights is worth."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from bus.weights import WeightStore, delta
from bus.weights.files import digest_of
from ops.bench import describe_machine, mean, publish, say
from ops.bench_objects import measure_joining, measure_road, report_road
from ops.recipe import Recipe, load_recipe
from schemas import UserError

DTYPE, ELEMENT_NBYTES, LR = "bfloat16", 2, 1e-6
RECIPE = "smollm2.yaml"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaCost:
    """A version as a delta of the one before, made and applied in CPU seconds. `nbytes` None: it does not pay."""

    version: int
    full_nbytes: int
    nbytes: int | None
    changed: float  # share of the elements
    encode_s: float
    apply_s: float
    digest_s: float  # of the digest of the full file, which a reader of a delta takes as well as one of a full file
    identical: bool
    reward: float


async def bench_weights(size_gb: float, rounds: int, steps: int, recipe: Path | None, out: Path | None) -> int:
    """Measure, print the tables, write them to `out`. With 0 steps or 0 rounds that half is left out."""
    if steps == 0 and rounds == 0:
        raise UserError("With --steps 0 and --rounds 0 there is nothing to measure.", "Leave one of them out.")
    machine = describe_machine()
    lines = ["# Weights: deltas, and the road over the bus", "", f"`rollstream bench weights` on {machine}.", ""]
    if steps:
        costs = await asyncio.to_thread(lambda: list(measure_deltas(recipe or _smollm2(), steps)))
        lines += ["## Deltas", "", *report_deltas(costs, recipe), ""]
    if rounds:
        passages = await measure_road(round(size_gb * 1e9), rounds)
        lines += ["## The object road", "", *report_road(passages, await measure_joining()), ""]
    publish("\n".join(lines).rstrip() + "\n", out)
    return 0


def _smollm2() -> Path:
    import recipes

    return Path(recipes.__path__[0]) / RECIPE


def measure_deltas(recipe: Path, steps: int) -> Iterator[DeltaCost]:
    """Train `steps` steps in a plain loop, and encode each version against the one before."""
    from ops.prepare import prepare
    from ops.reference import train

    overrides = (f"steps={steps}", f"rollout.dtype={DTYPE}", f"trainer.lr={LR}", "trainer.warmup_steps=0")
    resolved: Recipe = load_recipe(recipe, (*overrides, "evaluation.count=0"))
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder:
        say(f"making the model of {recipe}")
        initial = prepare(resolved, Path(folder))
        store = WeightStore(Path(folder) / "weights")
        before = b""
        for trained in train(resolved, initial, store):
            content = store.resolve(trained.weights.path).read_bytes()
            if before:
                cost = _cost(trained.weights.version, before, content, trained.metrics.get("reward_mean", 0.0))
                say(f"version {cost.version}: {cost.nbytes} of {cost.full_nbytes} bytes")
                yield cost
                store.collect(trained.weights.version, set())
            before = content


def _cost(version: int, before: bytes, content: bytes, reward: float) -> DeltaCost:
    digests = digest_of(before), digest_of(content)
    encoded, encode_s = _timed(lambda: delta.encode(before, content, *digests))
    made = bytearray(before)
    apply_s = 0.0
    if encoded is not None:
        _, apply_s = _timed(lambda: delta.apply(encoded, made, *digests))
    _, digest_s = _timed(lambda: digest_of(made))
    return DeltaCost(
        version,
        len(content),
        None if encoded is None else len(encoded),
        0.0 if encoded is None else _changed(encoded, ELEMENT_NBYTES, len(content)),
        encode_s,
        apply_s,
        digest_s,
        encoded is not None and made == content,
        reward,
    )


def _changed(encoded: bytes, element_nbytes: int, nbytes: int) -> float:
    """Share of the elements that a delta changes."""
    start = len(delta.MAGIC) + 4
    header = json.loads(encoded[start : start + int.from_bytes(encoded[start - 4 : start], "little")])
    return float(sum(changed for _, _, _, changed, _ in header["blocks"]) * element_nbytes / nbytes)


def report_deltas(costs: Sequence[DeltaCost], recipe: Path | None) -> list[str]:
    """The result as Markdown."""
    model = "SmolLM2-135M" if recipe is None else str(recipe)
    lines = [
        f"{model}, {len(costs)} GRPO steps of the learner at a learning rate of {LR:g}, float32 master weights "
        f"published in {DTYPE}. Times are CPU seconds of one thread for the whole model; reading a full version takes "
        "the digest alone, reading a delta takes applying it and the digest.",
        "",
        "| version | full, MB | delta, MB | of full | smaller by | elements changed | encode, s | apply, s | digest, s "
        "| bit-identical |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for cost in costs:
        told = [f"{cost.version}", f"{cost.full_nbytes / 1e6:.1f}"]
        if cost.nbytes is None:
            told += ["full", "", "", ""]
        else:
            share = cost.nbytes / cost.full_nbytes
            told += [f"{cost.nbytes / 1e6:.3f}", f"{share:.3%}", f"{1 / share:.0f}", f"{cost.changed:.3%}"]
        told += [f"{cost.encode_s:.2f}", f"{cost.apply_s:.2f}", f"{cost.digest_s:.2f}"]
        told.append("yes" if cost.identical else "sent in full" if cost.nbytes is None else "NO")
        lines.append(f"| {' | '.join(told)} |")
    pays = [cost for cost in costs if cost.nbytes is not None]
    if pays:
        gb = costs[0].full_nbytes / 1e9
        lines += [
            "",
            f"A gigabyte of full weights takes {mean([cost.encode_s for cost in costs]) / gb:.2f} CPU s to encode, "
            f"{mean([cost.apply_s for cost in pays]) / gb:.2f} to apply, {mean([c.digest_s for c in costs]) / gb:.2f} "
            "for its digest.",
        ]
    return lines


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    return work(), time.process_time() - began
