"""One run of the staleness study, as the whole of a process: every batch exactly so many versions old.

`python -m ops.bench_staleness_run RECIPE.yaml MODEL STALENESS RESULT.json`, where the result is a `Course`. It is the
plain loop of `ops.reference`, with the product's decoder, learner and losses, so that staleness alone differs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from ops.recipe import Recipe

HELD_OUT_EVERY = 10  # steps
METRICS = ("clip_fraction", "masked_fraction", "behaviour_weight_max", "mismatch_kl", "grad_norm", "entropy")


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """How a run went. `series` has one value a step under each name: "reward", "staleness" and those of `METRICS`.

    The reward is the mean of the step's batch, that is of the policy that sampled it. `held_out` are (steps done, mean
    reward of the newest policy on problems that are never trained on).
    """

    series: Mapping[str, Sequence[float]]
    held_out: Sequence[tuple[int, float]]

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        aside = path.with_name(f".{path.name}-{os.getpid()}")
        aside.write_text(json.dumps(dataclasses.asdict(self)))
        aside.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` wrote."""
        fields = json.loads(path.read_text())
        return cls(fields["series"], [(int(step), float(reward)) for step, reward in fields["held_out"]])


def train(recipe: Recipe, model: Path, staleness: int) -> Course:
    """Train as the recipe says, each batch `staleness` versions old, or as old as there are versions."""
    from actors.rollout.torch_engine import Decoder
    from bus.weights import WeightStore
    from ops import reference

    series: dict[str, list[float]] = {name: [] for name in ("reward", "staleness", *METRICS)}
    held_out: list[tuple[int, float]] = []
    judge = reference.Sampler(recipe, model, decoder := Decoder.from_pretrained(model, recipe.rollout), held_out=True)
    with tempfile.TemporaryDirectory() as folder:
        store = WeightStore(Path(folder))
        for done, trained in enumerate(reference.train(recipe, model, store, staleness)):
            if done == 0:
                first = trained.weights
            if trained.metrics:
                series["reward"].append(trained.metrics["reward_mean"])
                ages = [done - 1 - sample.versions for sample in trained.samples if sample.versions is not None]
                series["staleness"].append(float(np.concatenate(ages).mean()))
                for name in METRICS:
                    series[name].append(trained.metrics.get(name, 0.0))  # none of a batch that teaches nothing
            if recipe.evaluation.count and (done % HELD_OUT_EVERY == 0 or done == recipe.steps):
                reference.hold(decoder, trained.weights, store, first)
                held_out.append((done, judge.evaluate()))
    return Course(series, held_out)


def main(arguments: Sequence[str]) -> None:
    """Train as told, and leave the course."""
    recipe, model, staleness, result = arguments
    train(Recipe.from_yaml(Path(recipe).read_text()), Path(model), int(staleness)).write(Path(result))


if __name__ == "__main__":
    main(sys.argv[1:])
