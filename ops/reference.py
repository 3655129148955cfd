"""The same training as a plain loop: generate a batch, score it, train on it, load the weights, begin again.

No bus, no processes, nothing at the same time: what a run at η = 0 must equal, and what its cost is measured against.

Why the weights are equal bit for bit. At η = 0 a group is admitted only when the weights of its step are announced, and
a worker generates for it only with those, so every sample is drawn from the same policy as here. Its tokens follow from
its row, seed and weights, which are the same functions of run seed, group and index here as there; and with
`rollout.deterministic` not even the last bits of its logprobs depend on which worker had it, beside which others, or
in which order they came. A filter drops the same groups, whose places the next ones take. So step i trains on the same
set of samples, and the learner is a function of its state and of that set. Without `deterministic` the two differ in
the last bits of some logprobs, and after the first step in those of the weights. (On a CPU, with float32 weights.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.controller.actor import sample_seed
from actors.controller.groups import EQUAL_REWARDS
from actors.reward.load import load
from actors.reward.read import read_reward
from actors.reward.verdict import RewardRequest
from actors.reward.verifiers import Setting
from bus.weights import WeightStore, WeightWriter
from ops.datasets import Dataset, load_dataset
from ops.recipe import Recipe
from ops.text import HfTokenizer, prompt_counter
from schemas import WeightVersion, sample_id

if TYPE_CHECKING:
    from actors.rollout.engine import Generation, Request, Sampling
    from actors.rollout.torch_engine import Decoder
    from actors.trainer.samples import TrainSample


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """What one step came to: the weights after it, the learner's metrics, how many tokens were generated for it, and
    the samples that it was trained on.

    Version 0 comes first, with nothing of them: `Trained(WeightVersion(0, ...), {}, 0, ())`.
    """

    weights: WeightVersion
    metrics: Mapping[str, float]
    tokens: int
    samples: Sequence[TrainSample]


def train(recipe: Recipe, initial: Path, store: WeightStore, staleness: int = 0) -> Iterator[Trained]:
    """Train the model in the folder `initial` as the recipe says, one step each time that the next value is asked for.

    Weights go to `store`. Every batch is sampled with the weights of `staleness` versions ago, or with version 0 while
    there are none so old. The recipe's own bound, processes and checkpoints mean nothing here; a reward that raises, or
    a prompt that leaves no room for an answer, raises here too. Sets the number of torch threads and torch's seed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from actors.rollout.torch_engine import Decoder
    from ops.trained_model import learner_of, weights_of

    decoder = Decoder.from_pretrained(initial, recipe.rollout, version=-1)
    sampler = Sampler(recipe, initial, decoder)
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_pretrained(str(initial), dtype=torch.float32)
    learner = learner_of(model, recipe, initial)
    writer = WeightWriter(store)
    files: list[WeightVersion] = []

    def published(version: int) -> WeightVersion:
        files.append(writer.publish(writer.snapshot(version, weights_of(learner, recipe))))
        due = files[max(0, version - staleness)]
        if decoder.version != due.version:
            hold(decoder, due, store, files[0])
        return files[-1]

    yield Trained(published(0), {}, 0, ())
    for step in range(recipe.steps):
        torch.set_num_threads(recipe.rollout.threads)
        before = decoder.tokens_generated
        samples = sampler.batch()
        torch.set_num_threads(recipe.trainer.threads)
        metrics = learner.step(step, samples)
        yield Trained(published(step + 1), metrics, decoder.tokens_generated - before, samples)


def hold(decoder: Decoder, weights: WeightVersion, store: WeightStore, first: WeightVersion) -> None:
    """Have a decoder hold weights that `train` left in `store`; `first` is version 0, which adapters stand on."""
    base = store.resolve(first.path) if weights.kind == "adapter" else None
    decoder.load(weights.version, store.resolve(weights.path), base)


class Sampler:
    """Batches of scored samples, in the order of the data, under the weights that the decoder holds.

    With `held_out` the rows are those that are never trained on.
    """

    def __init__(self, recipe: Recipe, initial: Path, decoder: Decoder, *, held_out: bool = False) -> None:
        from transformers import AutoConfig

        from actors.rollout.engine import Sampling

        rollout = recipe.rollout
        self._recipe = recipe
        self._decoder = decoder
        self._tokenizer = HfTokenizer(str(initial), recipe.data.template_options)
        count = prompt_counter(recipe.data, lambda: initial)
        self._data: Dataset = load_dataset(
            recipe.data, recipe.base, seed=recipe.seed, held_out=held_out, count_tokens=count
        )
        self._reward, self._keywords = load(
            recipe.reward.function, recipe.reward.options, Setting(recipe.base, recipe.reward.timeout_s)
        )
        eos = AutoConfig.from_pretrained(str(initial)).eos_token_id
        self._sampling: Sampling = Sampling(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=self._tokenizer.stop_token_ids(rollout.stop, eos),
        )
        self._next_group = 0

    def batch(self) -> list[TrainSample]:
        """The samples of the next groups that the filter lets pass."""
        wanted = self._recipe.controller.batch_groups
        groups: list[list[TrainSample]] = []
        while missing := wanted - len(groups):
            numbers = range(self._next_group, self._next_group + missing)
            self._next_group += missing
            groups += [group for group in self._groups(numbers) if self._teaches(group)]
        return [sample for group in groups for sample in group]

    def evaluate(self) -> float:
        """Mean reward of the first rows, one answer each, as many and as greedily as the recipe's evaluation says."""
        greedy, count = self._recipe.evaluation.greedy, self._recipe.evaluation.count
        sampling = dataclasses.replace(self._sampling, temperature=0.0) if greedy else self._sampling
        groups = self._groups(range(count), size=1, sampling=sampling)
        return sum(sample.reward for (sample,) in groups) / count

    def _teaches(self, group: list[TrainSample]) -> bool:
        rewards = [sample.reward for sample in group]
        return self._recipe.controller.filter == "none" or max(rewards) - min(rewards) >= EQUAL_REWARDS

    def _groups(
        self, numbers: range, size: int | None = None, sampling: Sampling | None = None
    ) -> list[list[TrainSample]]:
        from actors.rollout.engine import Request

        size = size or self._recipe.controller.group_size
        rows = {group: dict(self._data.row(group)) for group in numbers}
        requests = [
            Request(
                sample_id=sample_id(group, index),
                prompt_tokens=self._tokenizer.encode_prompt(row["prompt"]),
                sampling=sampling or self._sampling,
                seed=sample_seed(self._recipe.seed, group, index),
            )
            for group, row in rows.items()
            for index in range(size)
        ]
        done = _generate(self._decoder, requests)
        return [
            [self._scored(group, index, row, done[sample_id(group, index)]) for index in range(size)]
            for group, row in rows.items()
        ]

    def _scored(self, group: int, index: int, row: Mapping[str, Any], generation: Generation) -> TrainSample:
        from actors.trainer.samples import TrainSample

        assert generation.finish is not None
        task = dict(row)
        request = RewardRequest(
            sample_id=generation.sample_id,
            prompt=task.pop("prompt"),
            response=self._tokenizer.decode(generation.tokens),
            finish=generation.finish,
            task=task,
            tokens=generation.tokens,
        )
        value, _ = read_reward(self._reward(**{name: getattr(request, name) for name in self._keywords}))
        return TrainSample(
            sample_id=f"{group}-{index:06d}",  # sorts by index, as the trainer's own
            group_id=group,
            prompt_tokens=np.array(generation.prompt_tokens, np.int32),
            tokens=np.array(generation.tokens, np.int32),
            behaviour_logprobs=np.array(generation.logprobs, np.float32),
            loss_mask=np.ones(len(generation.tokens), np.bool_),
            reward=value,
            finish=generation.finish,
            versions=np.array([v for v, count in generation.segments for _ in range(count)], np.int32),
        )


def _generate(decoder: Decoder, requests: list[Request]) -> dict[str, Generation]:
    """All of them to their end, by sample id; as many together as there are slots."""
    done: dict[str, Generation] = {}
    waiting = requests
    while waiting or decoder.running:
        free = decoder.slots - decoder.running
        joining, waiting = waiting[:free], waiting[free:]
        if joining:
            decoder.add(joining)
        done |= {generation.sample_id: generation for _, generation in decoder.step()}
    return done
