"""`rollstream bench swap`: how long new weights stop the worker that takes them, and whether they stop anybody else.

Two workers decode without end, each held to a core of its own, as on machines of their own. One is given versions, as
deltas in a directory, once keeping its KV cache and once rebuilding it; the other is not, and is watched meanwhile, and
while weights are saved and evaluated beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.rollout.config import RolloutConfig
from bus.weights import HostCache, WeightReader, WeightStore, WeightWriter
from ops.bench import command, describe_machine, publish, say
from schemas import UserError, WeightVersion

if TYPE_CHECKING:
    from actors.rollout.threaded import ThreadedEngine

PUBLISHED = "bfloat16"
LOOK_S = 0.002  # between two looks at the number of tokens
WARM_S = 120.0  # at most
WARM_TOKENS = 4  # a sequence, before anything is measured
USUAL_STEPS = 50  # of which the median is a usual one
REST_TIMES = 3
SETTLED_STEPS = 10  # after an update, before it counts as over
PROMPT_TOKENS = 16
NEW_TOKENS = 256
CHANGED = 0.01  # share of the weights that a version changes


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
    """One update: wall seconds in which no token came beyond those of a usual step; seconds of usual decoding that the
    update cost in all; of these, writing the weights and prefilling what runs; and of a worker at rest, reading
    (fetching and verifying) and loading the version in full.
    """

    on_update: str
    down_s: float
    lost_s: float
    writing_s: float
    rebuilding_s: float
    read_s: float
    load_s: float


async def bench_swap(
    model: Path | None,
    updates: int,
    slots: int,
    on_update: Sequence[str],
    dtype: str,
    seconds: float,
    out: Path | None,
) -> int:
    """Measure, print the table, write it to `out`. `on_update` are the ways to be measured, one after another.

    Raises `UserError` if a worker fails, or there is one core only.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UserError("Two workers need a core each, and this machine has one.", "Run it on another machine.")
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder:
        place = Path(folder)
        name = model.resolve().name if model is not None else "SmolLM2-135M"
        if model is None:
            from ops.bench_engines import smollm2

            say("making the model")
            model = smollm2(place / "model")
        say(f"publishing {updates} versions")
        _publish_versions(model, place, updates)
        spec = {"name": name, "model": str(model), "slots": slots, "on_update": list(on_update), "dtype": dtype}
        spec |= {"seconds": seconds}
        (place / "spec.json").write_text(json.dumps(spec))
        arguments = ("ops.bench_swap", folder)
        taking = command((*arguments, "takes", str(cores[0])), place / "takes.txt")
        watched = command((*arguments, "watched", str(cores[1])), place / "watched.txt")
        say("two workers decode")
        await asyncio.gather(taking, watched)
        swaps = [Swap(**swap) for swap in json.loads((place / "takes.json").read_text())]
        rates: dict[str, float] = json.loads((place / "watched.json").read_text())
    if not rates["nothing"]:
        raise UserError(
            f"A worker made no two steps in {seconds:g} s.", "Give it more --seconds, or a quieter machine."
        )
    publish(report(swaps, rates, spec, machine), out)
    return 0


def report(swaps: Sequence[Swap], rates: Mapping[str, float], spec: Mapping[str, Any], machine: str) -> str:
    """The result as Markdown."""
    lines = [
        "# What new weights cost their workers",
        "",
        f"`rollstream bench swap` on {machine}.",
        "",
        f"{spec['name']} in {spec['dtype']}, published in {PUBLISHED}, {spec['slots']} sequences at once, each of "
        f"{PROMPT_TOKENS} + {NEW_TOKENS} tokens. A worker is down for the longest time without a token, less a usual "
        "step, from the update until all that ran runs again: for writing, and with `recompute` for the prefill of its "
        "shortest sequences. Those go on while the others are prefilled, which is work of the size of the answers and "
        "not of the weights. Lost is all of it: the time in which as many tokens as are missing would usually come. "
        "Reading and loading are those of the same version by a worker that decodes nothing.",
        "",
        "| on_update | update | down, s | lost, s | writing, s | prefilling, s | read, s | load, s | "
        "down / (read + load) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    ways = {way: [swap for swap in swaps if swap.on_update == way] for way in spec["on_update"]}
    for way, of_way in ways.items():
        for number, swap in enumerate(of_way, 1):
            values = " | ".join(f"{value:.3f}" for value in dataclasses.astuple(swap)[1:])
            lines.append(f"| {way} | {number} | {values} | {_ratio(swap):.2f} |")
    lines += ["", "Over reading and loading:", "", "| on_update | down, median | down, worst | lost, median |"]
    lines.append("|---|--:|--:|--:|")
    for way, of_way in ways.items():
        downs = [_ratio(swap) for swap in of_way]
        lost = statistics.median(swap.lost_s / (swap.read_s + swap.load_s) for swap in of_way)
        lines.append(f"| {way} | **{statistics.median(downs):.2f}** | {max(downs):.2f} | {lost:.2f} |")
    lines += ["", "The other worker:", "", "| meanwhile | tokens/s | of undisturbed |"]
    lines.append("|---|--:|--:|")
    undisturbed = rates["nothing"]
    lines += [f"| {what} | {rate:.1f} | {rate / undisturbed:.3f} |" for what, rate in rates.items()]
    return "\n".join(lines) + "\n"


def _ratio(swap: Swap) -> float:
    return swap.down_s / (swap.read_s + swap.load_s)


def _publish_versions(model: Path, place: Path, updates: int) -> None:
    """Version 0 and `updates` deltas, of which each moves a share of the weights by one unit in the last place."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from ops.host import weights_folder

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, PUBLISHED)).state_dict()
    writer = WeightWriter(WeightStore(weights_folder(place)), full_every=updates + 1, delta=True)
    generator = torch.Generator().manual_seed(0)
    before, events = None, []
    for version in range(updates + 1):
        if version:
            for tensor in weights.values():
                bits = tensor.view(torch.int16)
                bits ^= (torch.rand(bits.shape, generator=generator) < CHANGED).to(torch.int16)
        snapshot = writer.snapshot(version, weights)
        events.append(writer.publish(snapshot, before).packed())
        before = snapshot
    (place / "events.json").write_text(json.dumps(events))


# ---- a worker, in a process of its own


class _Worker:
    """Decodes without end, and notes when tokens came."""

    def __init__(self, place: Path, core: int) -> None:
        os.sched_setaffinity(0, {core})
        self.spec: dict[str, Any] = json.loads((place / "spec.json").read_text())
        self.place = place
        self.times: list[tuple[float, int]] = []  # (monotonic seconds, tokens so far), whenever there were more
        events = json.loads((place / "events.json").read_text())
        self.events = [WeightVersion.unpacked(fields) for fields in events]
        self.engine = self.engine_for(self.spec["on_update"][0])

    def engine_for(self, on_update: str) -> ThreadedEngine:
        """An engine that takes updates in this way, and holds version 0."""
        from actors.rollout.threaded import ThreadedEngine
        from actors.rollout.torch_engine import Decoder

        fields = {"slots": self.spec["slots"], "on_update": on_update, "dtype": self.spec["dtype"]}
        config = RolloutConfig.model_validate(fields)
        return ThreadedEngine(Decoder.from_pretrained(self.spec["model"], config, version=0))

    def reader(self, name: str) -> WeightReader:
        """A reader with a cache of its own."""
        from ops.host import weights_folder

        async def event_of(version: int) -> WeightVersion:
            return self.events[version]

        return WeightReader(event_of, WeightStore(weights_folder(self.place)), HostCache(name, self.place / "cache"))

    @contextlib.asynccontextmanager
    async def decoding(self) -> Any:
        """With a full batch, always."""
        await self.engine.start()
        tasks = [asyncio.create_task(self._ask(slot)) for slot in range(self.spec["slots"])]
        tasks.append(asyncio.create_task(self._look()))
        try:
            async with asyncio.timeout(WARM_S):
                while self.engine.stats().tokens_generated < WARM_TOKENS * self.spec["slots"]:
                    for task in tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(LOOK_S)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.engine.close()

    async def _ask(self, slot: int) -> None:
        from actors.rollout.engine import Request, Sampling

        number = 0
        # The first ones begin where they would be by then: work is the same at all times, or it could not be compared.
        new = max(1, NEW_TOKENS * (slot + 1) // self.spec["slots"])
        while True:
            number += 1
            length = PROMPT_TOKENS + NEW_TOKENS - new
            prompt = tuple(5 + (slot + place) % 50 for place in range(length))  # any model has these tokens
            await self.engine.generate(Request(f"{slot}-{number}", prompt, Sampling(new), seed=1000 * slot + number))
            new = NEW_TOKENS

    async def _look(self) -> None:
        while True:
            tokens = self.engine.stats().tokens_generated
            if not self.times or self.times[-1][1] != tokens:
                self.times.append((time.monotonic(), tokens))
            await asyncio.sleep(LOOK_S)

    def rate(self, start: float, stop: float) -> float:
        """Tokens a second between two times; 0 if there were not two steps."""
        within = [(at, tokens) for at, tokens in self.times if start <= at <= stop]
        if len(within) < 2:
            return 0.0
        return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])


async def _takes(worker: _Worker) -> list[Swap]:
    """Take one version after another, in each of the ways; then do the same at rest."""
    downs: list[tuple[int, tuple[str, float, float, float, float]]] = []
    for way in worker.spec["on_update"]:
        worker.engine = worker.engine_for(way)
        reader = worker.reader(f"decoding-{way}")
        async with worker.decoding():
            if not downs:  # undisturbed, for the other one
                (worker.place / "began").touch()
                await asyncio.sleep(worker.spec["seconds"])
            (worker.place / f"updating-{way}").touch()
            downs += [(event.version, (way, *await _take(worker, reader, event))) for event in worker.events[1:]]
            (worker.place / f"updated-{way}").touch()
        reader.close()
    at_rest = {event.version: await _at_rest(worker, event.version) for event in worker.events[1:]}
    return [Swap(*down, *at_rest[version]) for version, down in downs]


async def _take(worker: _Worker, reader: WeightReader, event: WeightVersion) -> tuple[float, float, float, float]:
    """Seconds without a token, seconds lost in all, and of these the writing and the prefilling."""
    steps = list(itertools.pairwise(worker.times[-USUAL_STEPS:]))
    usual_s = statistics.median(after - before for (before, _), (after, _) in steps)
    usual_tokens = statistics.median(after - before for (_, before), (_, after) in steps)
    before = worker.engine.stats()
    local = await reader.fetch(event)
    began = time.monotonic()
    await worker.engine.update(event.version, local.path)
    async with asyncio.timeout(WARM_S):
        while worker.engine.stats().rebuilding:
            await asyncio.sleep(LOOK_S)
    await asyncio.sleep(SETTLED_STEPS * usual_s + 2 * LOOK_S)
    after = worker.engine.stats()
    within = [(at, tokens) for at, tokens in worker.times if at >= began - usual_s]
    down_s = max(later - earlier for (earlier, _), (later, _) in itertools.pairwise(within)) - usual_s
    lost_s = within[-1][0] - within[0][0] - (within[-1][1] - within[0][1]) / usual_tokens * usual_s
    rebuilding_s = after.rebuilding_s - before.rebuilding_s
    return max(0.0, down_s), lost_s, after.swapping_s - before.swapping_s - rebuilding_s, rebuilding_s


async def _at_rest(worker: _Worker, version: int) -> tuple[float, float]:
    """Seconds to read and verify a version that is there in full, and to load it into a model that decodes nothing: the
    least of several times, as the operating system may have dropped the file from memory before."""
    from actors.rollout.torch_engine import Decoder

    reader = worker.reader("at rest")
    path = (await reader.fetch(worker.events[version])).path  # made of deltas; what is timed is reading it in full
    config = RolloutConfig(slots=1, dtype=worker.spec["dtype"])
    decoder = Decoder.from_pretrained(worker.spec["model"], config, version=-1)
    reads, loads = [], []
    for _ in range(REST_TIMES):
        began = time.monotonic()
        assert (await reader.fetch(worker.events[version])).path == path
        read = time.monotonic()
        decoder.load(version, path)
        reads.append(read - began)
        loads.append(time.monotonic() - read)
    reader.close()
    return min(reads), min(loads)


async def _watched(worker: _Worker) -> dict[str, float]:
    """Tokens a second: undisturbed, while the other one takes versions, saves a checkpoint, and evaluates."""
    rates: dict[str, float] = {}
    async with worker.decoding():
        ways = worker.spec["on_update"]
        rates["nothing"] = await _during(worker, "began", f"updating-{ways[0]}")
        for way in ways:
            rates[f"the other worker takes new weights, {way}"] = await _during(
                worker, f"updating-{way}", f"updated-{way}"
            )
        rates["weights and optimizer are saved"] = await _during(worker, "saving", "saved")
        rates["the weights are evaluated"] = await _during(worker, "saved", "evaluated")
    return rates


async def _during(worker: _Worker, start: str, stop: str) -> float:
    while not (worker.place / start).exists():
        await asyncio.sleep(LOOK_S)
    began = time.monotonic()
    while not (worker.place / stop).exists():
        await asyncio.sleep(LOOK_S)
    return worker.rate(began, time.monotonic())


async def _disturb(worker: _Worker) -> None:
    """Save, then evaluate, on the core of the worker that took the versions and has ended."""
    from transformers import AutoModelForCausalLM

    from actors.trainer.checkpoint import save

    model = AutoModelForCausalLM.from_pretrained(worker.spec["model"])
    state = {"model": model.state_dict(), "moments": [model.state_dict(), model.state_dict()]}
    (worker.place / "saving").touch()
    for step in _for(worker.spec["seconds"]):
        await asyncio.to_thread(save, worker.place / "checkpoints", step, state)
    (worker.place / "saved").touch()
    worker.engine = worker.engine_for(worker.spec["on_update"][0])
    async with worker.decoding():
        await asyncio.sleep(worker.spec["seconds"])
    (worker.place / "evaluated").touch()


def _for(seconds: float) -> Iterator[int]:
    until = time.monotonic() + seconds
    step = 0
    while time.monotonic() < until:
        yield step
        step += 1


async def _main(place: Path, role: str, core: int) -> None:
    worker = _Worker(place, core)
    if role == "takes":
        swaps = await _takes(worker)
        (place / "takes.json").write_text(json.dumps([dataclasses.asdict(swap) for swap in swaps]))
        await _disturb(worker)
    else:
        (place / "watched.json").write_text(json.dumps(await _watched(worker)))


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
