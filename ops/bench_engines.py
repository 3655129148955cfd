"""`rollstream bench engines`: tokens per second of the built-in engine, of vLLM, and of a padded `generate`.

One run, one model, the same prompts and lengths for all; the engines take turns within every measurement, so that a
machine that grows busier favours none. What others do on the machine bends wall time, so CPU seconds, of all processes
of an engine, are counted as well, and the ratios are of these.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import math
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from actors.rollout.config import RolloutConfig
from actors.rollout.engine import Engine, Request, Sampling
from ops.bench import describe_machine, publish, say
from ops.models import ModelConfig, prepare_model
from schemas import UserError

BATCHES = (1, 16, 64)
WARM_UP_TOKENS = 4
PROMPT_TOKENS = (16, 48)
MEDIAN_TOKENS, SPREAD = 32, 0.9  # of the long-tailed lengths: log-normal, as answers with reasoning are
LONGEST_TOKENS = 256
PADDED, BUILT_IN, VLLM = "generate, padded", "built-in", "vLLM"

Generate = Callable[[Sequence[Request]], Awaitable[None]]


@dataclasses.dataclass(slots=True)
class Speed:
    """Tokens that were wanted, and what they took."""

    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive together, to be decoded at most `slots` at a time."""

    name: str
    slots: int
    requests: tuple[Request, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each answer, ascending."""
        return sorted(request.sampling.max_new_tokens for request in self.requests)


async def bench_engines(
    model: Path | None,
    batches: Sequence[int] = BATCHES,
    new_tokens: int = 64,
    samples: int = 96,
    slots: int = 16,
    rounds: int = 2,
    dtype: str = "bfloat16",
    out: Path | None = None,
) -> int:
    """Measure, print the table, write it to `out`. `model` is a model folder; by default SmolLM2-135M is made.

    Batches of `new_tokens` each, then `samples` of long-tailed lengths through `slots`, all of it `rounds` times.
    Raises `UserError`.
    """
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder:
        path = model or smollm2(Path(folder) / "model")
        vocabulary = _vocabulary(path)
        workloads = [fixed(batch, new_tokens, vocabulary) for batch in batches]
        workloads.append(long_tailed(samples, slots, vocabulary))
        speeds = await measure(path, workloads, rounds, dtype)
    publish(report(workloads, speeds, machine, dtype), out)
    return 0


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct, made as its recipe makes it. Raises `UserError`."""
    import recipes

    return Path(prepare_model(ModelConfig(make="smollm2.py:make_model"), Path(recipes.__path__[0]), folder, seed=0))


def fixed(batch: int, new_tokens: int, vocabulary: int) -> Workload:
    """A batch whose answers are all as long."""
    return Workload(f"batch {batch}", batch, _requests([new_tokens] * batch, vocabulary))


def long_tailed(samples: int, slots: int, vocabulary: int) -> Workload:
    """Samples whose lengths differ as answers do: a few are many times as long as most."""
    rng = random.Random(0)
    lengths = [
        max(1, min(LONGEST_TOKENS, round(rng.lognormvariate(math.log(MEDIAN_TOKENS), SPREAD)))) for _ in range(samples)
    ]
    return Workload("long-tailed", slots, _requests(lengths, vocabulary))


def _requests(lengths: Sequence[int], vocabulary: int) -> tuple[Request, ...]:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(vocabulary) for _ in range(rng.randint(*PROMPT_TOKENS))) for _ in lengths]
    return tuple(
        Request(f"{i}", prompt, Sampling(length), seed=i)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    )


async def measure(model: Path, workloads: Sequence[Workload], rounds: int, dtype: str) -> dict[tuple[str, str], Speed]:
    """The speed of each engine (if it is there) on each workload, by the names of both."""
    speeds: dict[tuple[str, str], Speed] = {}
    most = max(workload.slots for workload in workloads)
    vllm = await _vllm(model, most, dtype) if importlib.util.find_spec("vllm") else None
    try:
        for workload in workloads:
            built_in = await _built_in(model, workload.slots, dtype)
            contenders = {PADDED: _padded(model, workload.slots, dtype), BUILT_IN: _together(built_in, workload.slots)}
            if vllm is not None:
                contenders[VLLM] = _together(vllm, workload.slots)
            try:
                for name, speed in (await _in_turns(contenders, workload, rounds)).items():
                    say(f"{workload.name}, {name}: {speed.tokens / speed.wall_s:.0f} tokens/s, {speed.cpu_s:.1f} CPU s")
                    speeds[workload.name, name] = speed
            finally:
                await built_in.close()
    finally:
        if vllm is not None:
            await vllm.close()
    return speeds


async def _in_turns(contenders: Mapping[str, Generate], workload: Workload, rounds: int) -> dict[str, Speed]:
    short = [dataclasses.replace(one, sampling=Sampling(WARM_UP_TOKENS)) for one in workload.requests[: workload.slots]]
    for generate in contenders.values():  # kernels are chosen and caches made on the first call
        await generate(short)
    speeds = {name: Speed() for name in contenders}
    for turn in range(rounds):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            await _timed(contenders[name], workload, speeds[name])
    return speeds


async def _timed(generate: Generate, workload: Workload, speed: Speed) -> None:
    cpu_s, started_s = _cpu_s(), time.perf_counter()
    await generate(workload.requests)
    speed.wall_s += time.perf_counter() - started_s
    speed.cpu_s += _cpu_s() - cpu_s
    speed.tokens += sum(workload.lengths)


def _cpu_s() -> float:
    """Of this process, by the finest clock there is, and of all that it has started, in ticks of 10 ms."""
    started = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in started)


def _together(engine: Engine, slots: int) -> Generate:
    async def generate(requests: Sequence[Request]) -> None:
        room = asyncio.Semaphore(slots)

        async def one(request: Request) -> None:
            async with room:
                done = await engine.generate(request)
            assert len(done.tokens) == request.sampling.max_new_tokens

        await asyncio.gather(*(one(request) for request in requests))

    return generate


async def _built_in(model: Path, slots: int, dtype: str) -> Engine:
    from actors.rollout.threaded import ThreadedEngine
    from actors.rollout.torch_engine import Decoder

    config = RolloutConfig.model_validate({"slots": slots, "dtype": dtype})
    engine = ThreadedEngine(Decoder.from_pretrained(model, config))
    await engine.start()
    return engine


async def _vllm(model: Path, slots: int, dtype: str) -> Engine:
    from actors.rollout.vllm_engine import VllmEngine

    longest = {"max_model_len": PROMPT_TOKENS[1] + LONGEST_TOKENS}
    config = RolloutConfig.model_validate({"engine": "vllm", "slots": slots, "dtype": dtype, "vllm": longest})
    engine = VllmEngine(model, config)
    await engine.start()
    return engine


def _padded(path: Path, slots: int, dtype: str) -> Generate:
    """What one writes first: `slots` prompts at a time, padded, until the longest answer of them is done."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None

    class Ended(StoppingCriteria):
        def __init__(self, ends: Sequence[int]) -> None:
            self.ends = torch.tensor(ends)

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return self.ends <= input_ids.shape[1]

    def generate_sync(requests: Sequence[Request]) -> None:
        for first in range(0, len(requests), slots):
            part = requests[first : first + slots]
            width = max(len(request.prompt_tokens) for request in part)
            ids = torch.zeros(len(part), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, request in enumerate(part):
                ids[row, width - len(request.prompt_tokens) :] = torch.tensor(request.prompt_tokens)
                mask[row, width - len(request.prompt_tokens) :] = 1
            lengths = [request.sampling.max_new_tokens for request in part]
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
                max_new_tokens=max(lengths),
                stopping_criteria=StoppingCriteriaList([Ended([width + length for length in lengths])]),
            )

    async def generate(requests: Sequence[Request]) -> None:
        await asyncio.to_thread(generate_sync, requests)

    return generate


def _vocabulary(path: Path) -> int:
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(path).vocab_size)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no model folder: {error}.", "Name a folder as transformers writes it.") from error


def report(workloads: Sequence[Workload], speeds: dict[tuple[str, str], Speed], machine: str, dtype: str) -> str:
    """The result as Markdown."""
    tailed = workloads[-1]
    lengths = tailed.lengths
    lines = [
        "# How fast the engines are",
        "",
        f"`rollstream bench engines` on {machine}; {dtype}, one thread an engine.",
        "",
        f"Prompts of {PROMPT_TOKENS[0]} to {PROMPT_TOKENS[1]} random tokens. The long-tailed workload is "
        f"{len(lengths)} samples through {tailed.slots} slots: answers of {sum(lengths) / len(lengths):.0f} tokens in "
        f"the mean, median {lengths[len(lengths) // 2]}, longest {lengths[-1]}. Tokens count if they were asked for: "
        "padding does not. Ratios are of tokens per CPU second, all processes of an engine together.",
        "",
        "| workload | engine | tokens/s | tokens per CPU s | of padded generate |",
        "|---|---|--:|--:|--:|",
    ]
    for workload in workloads:
        base = speeds[workload.name, PADDED]
        for name in (PADDED, BUILT_IN, VLLM):
            if (speed := speeds.get((workload.name, name))) is None:
                continue
            ratio = (speed.tokens / speed.cpu_s) / (base.tokens / base.cpu_s)
            lines.append(
                f"| {workload.name} | {name} | {speed.tokens / speed.wall_s:.0f} | {speed.tokens / speed.cpu_s:.0f} | "
                f"{ratio:.2f} |"
            )
    if not importlib.util.find_spec("vllm"):
        lines += ["", "vLLM is not installed here and takes no part."]
    return "\n".join(lines) + "\n"
