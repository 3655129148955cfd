"""`kill -9` of the trainer in every phase of its work, dozens of times in one run: what comes of it is, bit by bit,
what comes of a run that nobody disturbs.

ROLLSTREAM_KILLS=200 kills so often in each run, by a seed of the moment, which a failure tells and
ROLLSTREAM_KILLS_SEED repeats.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ops.nats_server import NatsServer
from ops.recipe import load_recipe
from tests.e2e.harness import RECIPE
from tests.e2e.kills.forks import Forks
from tests.e2e.kills.hunt import Hunt, Outcome, draw_deaths
from tests.e2e.kills.points import EXPORT_PHASES, OUTSIDE, STEP_PHASES

ASKED = os.environ.get("ROLLSTREAM_KILLS")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(max(600, 10 * int(ASKED or 0)))]

SMALL = (
    "controller.batch_groups=2",
    "trainer.micro_batch_tokens=128",
)
STEPS_PER_KILL, STEPS_MIN = 1.5, 24  # a death moves the run on by a step or so, some by three
VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "grpo": (50, ("trainer.algorithm=grpo",)),
    "spoilt checkpoints": (12, ("trainer.algorithm=grpo", "trainer.minibatches=2", "trainer.publish.overlap=false")),
    "lora": (12, ("trainer.algorithm=grpo", "trainer.minibatches=2", "trainer.lora.rank=4")),
    "critic": (12, ("trainer.algorithm=ppo", "trainer.minibatches=2", "trainer.publish.delta=false")),
}


@pytest.fixture(scope="module")
def hunt(initial: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hunt]:
    folder = tmp_path_factory.mktemp("kills")
    server, forks = NatsServer(), Forks()
    try:
        url = asyncio.run(server.start(folder))
        yield Hunt(forks, url, initial, folder)
    finally:
        forks.close()
        asyncio.run(server.stop())


@pytest.mark.parametrize("variant", VARIANTS)
async def test_a_trainer_that_is_killed_in_every_phase_leaves_the_weights_of_one_that_is_not(
    variant: str, hunt: Hunt
) -> None:
    kills, changes = VARIANTS[variant]
    kills = int(ASKED or kills)
    name = variant.replace(" ", "-")
    seed = int(os.environ.get("ROLLSTREAM_KILLS_SEED", time.time_ns() % 100_000 if ASKED else 0))
    print(f"ROLLSTREAM_KILLS={kills} ROLLSTREAM_KILLS_SEED={seed}")  # pytest shows it if the test fails
    steps = max(STEPS_MIN, round(kills * STEPS_PER_KILL))
    length = (f"steps={steps}", f"controller.max_staleness={steps}")  # every sample is of version 0
    recipe = load_recipe(RECIPE, [*length, *SMALL, *changes])
    undisturbed = await hunt.run(f"{name}-undisturbed", recipe, seed=seed)
    deaths = draw_deaths(seed, kills, steps)
    killed = await hunt.run(f"{name}-killed", recipe, deaths, seed, spoil=variant == "spoilt checkpoints")
    print(dict(killed.deaths))
    assert killed.deaths.total() == kills
    assert killed.deaths.keys() >= {*EXPORT_PHASES, OUTSIDE}
    if kills >= 2 * len(STEP_PHASES):
        assert {*STEP_PHASES} - killed.deaths.keys() == set()
    assert_sound(undisturbed, steps)
    assert_sound(killed, steps)
    assert_same(killed, undisturbed)


def assert_sound(outcome: Outcome, steps: int) -> None:
    assert outcome.audit.clean, outcome.audit.to_json()
    assert outcome.audit.report.ended
    assert [event.version for event in outcome.weights] == list(range(steps + 1))
    assert [(done.step, done.version) for done in outcome.steps] == [(step, step + 1) for step in range(steps)]
    assert len({event.result_digest for event in outcome.weights}) == steps + 1  # every step moves the weights
    assert [path for path in outcome.leftovers if not path.startswith("weights/")] == []  # those go after an hour


def assert_same(killed: Outcome, undisturbed: Outcome) -> None:
    # what is sent as a delta by one may be sent in full by the other, which began again
    assert [event.result_digest for event in killed.weights] == [event.result_digest for event in undisturbed.weights]
    assert killed.metrics == undisturbed.metrics
    assert killed.model == undisturbed.model
    assert killed.checkpoint[0] == undisturbed.checkpoint[0]
    assert [path for path, one, other in _pairs(killed.checkpoint[1], undisturbed.checkpoint[1]) if one != other] == []


def _pairs(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves of two states side by side, tensors as lists."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from _pairs(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _pairs(left, right, f"{path}/{place}")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        yield path, (one.dtype, one.shape, one.tolist()), (other.dtype, other.shape, other.tolist())
    else:
        yield path, one, other
