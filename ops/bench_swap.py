"""`rollstream bench swap`: how long new weights stop the worker that takes them, and whether they stop anybody else.

Two workers decode without end, each held to a core of its own, as on machines of their own. One is given versions, as
deltas in a directory; the other is not, and is watched meanwhile, and while weights are saved and evaluated beside it.
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
from ops.bench import command, describe_machine, mean, publish, say
from schemas import UserError, WeightVersion

if TYPE_CHECKING:
    from actors.rollout.threaded import ThreadedEngine

PUBLISHED = "bfloat16"
LOOK_S = 0.002  # between two looks at the number of tokens
WARM_S = 3.0
PROMPT_TOKENS = 16
CHANGED = 0.01  # share of the weights that a version changes


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
    """One update: wall seconds in which no token came beyond those of a usual step, and of a worker at rest: reading
    (fetching and verifying) and loading the same version in full."""

    down_s: float
    writing_s: float
    read_s: float
    load_s: float


async def bench_swap(
    model: Path | None, updates: int, slots: int, on_update: str, dtype: str, seconds: float, out: Path | None
) -> int:
    """Measure, print the table, write it to `out`. Raises `UserError` if a worker fails, or there is one core only."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UserError("Two workers need a core each, and this machine has one.", "Run it on another machine.")
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder:
        place = Path(folder)
        if model is None:
            from ops.bench_engines import smollm2

            say("making the model")
            model = smollm2(place / "model")
        say(f"publishing {updates} versions")
        _publish_versions(model, place, updates)
        spec = {"model": str(model), "slots": slots, "on_update": on_update, "dtype": dtype, "seconds": seconds}
        (place / "spec.json").write_text(json.dumps(spec))
        arguments = ("ops.bench_swap", folder)
        taking = command((*arguments, "takes", str(cores[0])), place / "takes.txt")
        watched = command((*arguments, "watched", str(cores[1])), place / "watched.txt")
        say("two workers decode")
        await asyncio.gather(taking, watched)
        swaps = [Swap(**swap) for swap in json.loads((place / "takes.json").read_text())]
        rates: dict[str, float] = json.loads((place / "watched.json").read_text())
    publish(report(swaps, rates, spec, machine), out)
    return 0


def report(swaps: Sequence[Swap], rates: Mapping[str, float], spec: Mapping[str, Any], machine: str) -> str:
    """The result as Markdown."""
    lines = [
        "# What new weights cost their workers",
        "",
        f"`rollstream bench swap` on {machine}.",
        "",
        f"{Path(spec['model']).name} in {spec['dtype']}, published in {PUBLISHED}, {spec['slots']} sequences at once, "
        f"on_update {spec['on_update']}. A worker is down from the "
        "last token under the old weights to the first under the new ones, less a usual step. Reading and loading are "
        "those of the same version by a worker that decodes nothing.",
        "",
        "| update | down, s | of which writing and prefilling, s | read, s | load, s | down / (read + load) |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for number, swap in enumerate(swaps, 1):
        ratio = swap.down_s / (swap.read_s + swap.load_s)
        values = " | ".join(f"{value:.3f}" for value in dataclasses.astuple(swap))
        lines.append(f"| {number} | {values} | {ratio:.2f} |")
    ratio = mean([swap.down_s for swap in swaps]) / mean([swap.read_s + swap.load_s for swap in swaps])
    lines += ["", f"Mean: **{ratio:.2f}**.", "", "The other worker:", "", "| meanwhile | tokens/s | of undisturbed |"]
    lines.append("|---|--:|--:|")
    undisturbed = rates["nothing"]
    lines += [f"| {what} | {rate:.1f} | {rate / undisturbed:.3f} |" for what, rate in rates.items()]
    return "\n".join(lines) + "\n"


def _publish_versions(model: Path, place: Path, updates: int) -> None:
    """Version 0 and `updates` deltas, of which each moves a share of the weights by one unit in the last place."""
    import torch
    from transformers import AutoModelForCausalLM

    from ops.host import weights_folder

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
        self.engine = self._engine()

    def _engine(self) -> ThreadedEngine:
        from actors.rollout.threaded import ThreadedEngine
        from actors.rollout.torch_engine import Decoder

        config = RolloutConfig(slots=self.spec["slots"], on_update=self.spec["on_update"], dtype=self.spec["dtype"])
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
            await asyncio.sleep(WARM_S)
            for task in tasks:
                if task.done():
                    task.result()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.engine.close()

    async def _ask(self, slot: int) -> None:
        from actors.rollout.engine import Request, Sampling

        prompt = tuple(5 + (slot + place) % 50 for place in range(PROMPT_TOKENS))  # any model has these tokens
        number = 0
        while True:
            number += 1
            await self.engine.generate(Request(f"{slot}-{number}", prompt, Sampling(256), seed=1000 * slot + number))

    async def _look(self) -> None:
        while True:
            tokens = self.engine.stats().tokens_generated
            if not self.times or self.times[-1][1] != tokens:
                self.times.append((time.monotonic(), tokens))
            await asyncio.sleep(LOOK_S)

    def rate(self, start: float, stop: float) -> float:
        """Tokens a second between two times."""
        within = [(at, tokens) for at, tokens in self.times if start <= at <= stop]
        return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])

    def gaps(self, start: float, stop: float) -> list[float]:
        """Seconds between tokens that came between two times."""
        times = [at for at, _ in self.times if start <= at <= stop]
        return [after - before for before, after in itertools.pairwise(times)]


async def _takes(worker: _Worker) -> list[Swap]:
    """Take one version after another; then do the same at rest."""
    downs: list[tuple[float, float]] = []
    reader = worker.reader("decoding")
    async with worker.decoding():
        (worker.place / "began").touch()
        await asyncio.sleep(worker.spec["seconds"])  # undisturbed, for the other one
        usual = statistics.median(worker.gaps(time.monotonic() - worker.spec["seconds"], time.monotonic()))
        (worker.place / "updating").touch()
        for event in worker.events[1:]:
            writing = worker.engine.stats().swapping_s
            local = await reader.fetch(event)
            began = time.monotonic()
            await worker.engine.update(event.version, local.path)
            await asyncio.sleep(10 * usual + 2 * LOOK_S)
            down_s = max(worker.gaps(began - usual, time.monotonic())) - usual
            downs.append((max(0.0, down_s), worker.engine.stats().swapping_s - writing))
        (worker.place / "updated").touch()
    reader.close()
    return [Swap(*down, *await _at_rest(worker, version)) for version, down in enumerate(downs, 1)]


async def _at_rest(worker: _Worker, version: int) -> tuple[float, float]:
    """Seconds to read and verify a version that is there in full, and to load it into a model that decodes nothing."""
    from actors.rollout.torch_engine import Decoder

    reader = worker.reader("at rest")
    path = (await reader.fetch(worker.events[version])).path  # made of deltas; what is timed is reading it in full
    config = RolloutConfig(slots=1, dtype=worker.spec["dtype"])
    decoder = Decoder.from_pretrained(worker.spec["model"], config, version=-1)
    began = time.monotonic()
    assert (await reader.fetch(worker.events[version])).path == path
    read = time.monotonic()
    decoder.load(version, path)
    loaded = time.monotonic()
    reader.close()
    return read - began, loaded - read


async def _watched(worker: _Worker) -> dict[str, float]:
    """Tokens a second: undisturbed, while the other one takes versions, saves a checkpoint, and evaluates."""
    rates: dict[str, float] = {}
    async with worker.decoding():
        rates["nothing"] = await _during(worker, "began", "updating")
        rates["the other worker takes new weights"] = await _during(worker, "updating", "updated")
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
    worker.engine = worker._engine()
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
