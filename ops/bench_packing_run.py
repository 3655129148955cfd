"""What `rollstream bench packing` measures, each as the whole of a process, so that no measurement knows of another.

`python -m ops.bench_packing_run batches|pass|step ARGUMENTS.json RESULT.json`
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from actors.trainer.packing import Row, pack
from ops.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from actors.trainer.forward import MicroBatch, ScoredTokens
    from actors.trainer.samples import TrainSample

Way = Literal["packed", "sorted", "padded"]
WAYS: tuple[Way, ...] = ("packed", "sorted", "padded")
REPEATS = 2  # of a timed pass; the quickest counts
VOCABULARY = 1024
# SmolLM2's shape, smaller: grouped heads of 64, a feed-forward layer of 8/3 of the width, tied embeddings.
SMALL = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 2}


def rows_of(lengths: Sequence[int], way: Way, micro_batch_tokens: int) -> list[list[Row]]:
    """Micro-batches: packed as the trainer does, a row each sorted by length, or a row each in the order given.

    Of the last kind every row is to be as wide as the longest, so as many go into a micro-batch as then fit.
    """
    if way == "packed":
        return pack(lengths, micro_batch_tokens=micro_batch_tokens)
    if way == "sorted":
        return pack(lengths, micro_batch_tokens=micro_batch_tokens, share_rows=False)
    count = max(1, micro_batch_tokens // max(lengths))
    rows = [Row((i,), length) for i, length in enumerate(lengths)]
    return [rows[i : i + count] for i in range(0, len(rows), count)]


def positions(lengths: Sequence[int], way: Way, micro_batch_tokens: int) -> int:
    """Row positions that go through the model, padding among them."""
    if way == "padded":
        return len(lengths) * max(lengths)
    return sum(len(rows) * max(row.tokens for row in rows) for rows in rows_of(lengths, way, micro_batch_tokens))


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
    """What the plain loop trained on. `lengths` are those of each mini-batch's samples with a gradient, in tokens.

    `padding` is the learner's own metric, of each step.
    """

    lengths: list[list[int]]
    padding: list[float]
    reward: list[float]


def batches(recipe: str, model: str) -> Batches:
    """Train by the plain loop, and note lengths and padding."""
    from bus.weights import WeightStore
    from ops import reference

    told, found = Recipe.from_yaml(recipe), Batches([], [], [])
    with tempfile.TemporaryDirectory() as folder:
        for step, trained in enumerate(reference.train(told, Path(model), WeightStore(Path(folder))), start=-1):
            if trained.metrics:
                found.lengths.extend(minibatches(trained.samples, step, told))
                found.padding.append(trained.metrics["padding_fraction"])
                found.reward.append(trained.metrics["reward_mean"])
    return found


def minibatches(samples: Sequence[TrainSample], step: int, recipe: Recipe) -> list[list[int]]:
    """The lengths of each mini-batch's samples with a gradient, split as `actors.trainer.plan` splits them."""
    ordered = sorted(samples, key=lambda sample: (sample.group_id, sample.sample_id))
    rewards: dict[int, set[float]] = {}
    for sample in ordered:
        rewards.setdefault(sample.group_id, set()).add(sample.reward)
    shuffled = np.random.default_rng((recipe.trainer.seed, step)).permutation(len(ordered))
    parts = [[ordered[i] for i in members] for members in np.array_split(shuffled, recipe.trainer.minibatches)]
    lengths = [[len(s.prompt_tokens) + len(s.tokens) for s in part if len(rewards[s.group_id]) > 1] for part in parts]
    return [of_part for of_part in lengths if of_part]


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass over a mini-batch: CPU seconds, and bytes at most.

    `tensors` are the live tensors, counted; `resident` is what the process grew by. `loss`, and the gradient of some
    weights, tell that it is the same pass.
    """

    cpu_s: float
    tensors: int
    resident: int
    loss: float
    gradient: list[float]


def one_pass(lengths: list[int], way: Way, micro_batch_tokens: int, model: str | None) -> Pass:
    """A pass over sequences of these lengths, half of each a scored response, of a saved model or of a small one."""
    import torch

    from actors.trainer.forward import collate, model_traits, response_logprobs
    from ops.live_memory import LiveTensors, ResidentGrowth

    torch.set_num_threads(1)
    policy = _model(model)
    model_traits(policy)
    sequences = [_sequence(length, seed, policy.config.vocab_size) for seed, length in enumerate(lengths)]
    shared = way == "packed"
    micros = [collate(rows, sequences, shared=shared) for rows in rows_of(lengths, way, micro_batch_tokens)]
    if way == "padded":
        micros = [widened(micro, max(lengths)) for micro in micros]
    scored = sum(int(sequence.scored.sum()) for sequence in sequences)

    def run() -> float:
        total = 0.0
        for micro in micros:
            logprobs, _ = response_logprobs(policy, micro)
            loss = -logprobs.sum() / scored
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    grown = ResidentGrowth()
    loss = run()
    resident = grown.peak()
    norms = policy.get_input_embeddings().get_parameter("weight").grad
    assert norms is not None
    gradient = norms.norm(dim=1).tolist()
    policy.zero_grad(set_to_none=True)
    with LiveTensors() as memory:
        run()
    return Pass(_quickest(run), memory.peak, resident, loss, gradient)


def widened(micro: MicroBatch, width: int) -> MicroBatch:
    """A micro-batch of one sequence a row with padding up to `width` on the right, where nothing attends to it."""
    from torch.nn.functional import pad

    length = micro.input_ids.shape[1]

    def moved(places: Any) -> Any:
        return places // length * width + places % length

    return dataclasses.replace(
        micro,
        input_ids=pad(micro.input_ids, (0, width - length)),
        predictors=moved(micro.predictors),
        ends=moved(micro.ends),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The memory of a training step of the learner, in bytes, as in `Pass`."""

    micro_batches: int
    tensors: int
    resident: int


def one_step(micro_batches: int, length: int, rows: int) -> Step:
    """A step of the learner on so many micro-batches of `rows` sequences of `length` tokens; the one after its first,
    which makes the optimizer's state."""
    import torch

    from actors.trainer.config import TrainerConfig
    from actors.trainer.learner import Learner
    from actors.trainer.samples import TrainSample
    from ops.live_memory import LiveTensors, ResidentGrowth

    torch.set_num_threads(1)
    config = TrainerConfig(micro_batch_tokens=rows * length, row_tokens=length, minibatches=2)
    learner = Learner(_model(None), config)
    samples = []
    for i in range(2 * micro_batches * rows):
        made = _sequence(length, i, VOCABULARY)
        logprobs = np.full(len(made.response), -np.log(VOCABULARY), np.float32)
        samples.append(
            TrainSample(str(i), i // 2, made.prompt, made.response, logprobs, made.scored, reward=float(i % 2))
        )
    learner.step(0, samples[: 2 * rows])
    grown = ResidentGrowth()
    learner.step(1, samples)
    resident = grown.peak()
    with LiveTensors() as memory:
        learner.step(2, samples)
    return Step(micro_batches, memory.peak, resident)


def _model(path: str | None) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    model: PreTrainedModel
    if path is None:
        torch.manual_seed(0)
        sizes = SMALL | {"num_key_value_heads": 1, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
        model = LlamaForCausalLM(LlamaConfig(**sizes))  # type: ignore[arg-type, no-untyped-call]
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.train(False)
    return model


def _sequence(length: int, seed: int, vocabulary: int) -> ScoredTokens:
    from actors.trainer.forward import ScoredTokens

    ids = np.random.default_rng(seed).integers(1, vocabulary, length).astype(np.int32)
    half = max(1, length // 2)
    return ScoredTokens(ids[:half], ids[half:], np.ones(length - half, np.bool_))


def _quickest(run: Callable[[], float]) -> float:
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    return min(seconds)


def main(arguments: Sequence[str]) -> None:
    """Measure as told, and leave the result."""
    name, told, result = arguments
    measure: Any = {"batches": batches, "pass": one_pass, "step": one_step}[name]
    outcome = measure(**json.loads(Path(told).read_text()))
    Path(result).write_text(json.dumps(dataclasses.asdict(outcome)))


if __name__ == "__main__":
    main(sys.argv[1:])
