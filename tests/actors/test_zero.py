"""DeepSpeed's shards change where numbers lie, not what they are: two real processes on a CPU, stages 1, 2 and 3."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from actors.trainer import checkpoint
from actors.trainer.config import CriticConfig, LoraConfig
from actors.trainer.learner import Learner
from tests.actors.rank_job import CONFIG, SAVED_AT, run_job, train
from tests.actors.tiny_models import qwen3

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install -e '.[deepspeed]'"
)

SHARD_ALL = {"stage3_param_persistence_threshold": 0}  # or all of a small model stays whole
EXACT: dict[str, dict[str, object]] = {
    "ZeRO-1": {"zero": {"stage": 1}},
    "ZeRO-2": {"zero": {"stage": 2}},
    "ZeRO-3": {"zero": {"stage": 3, "settings": SHARD_ALL}},
    "ZeRO-3, offloaded, layers computed again": {
        "zero": {"stage": 3, "offload_optimizer": True, "offload_weights": True, "settings": SHARD_ALL},
        "gradient_checkpointing": True,
    },
}
ADAPTERS: dict[str, dict[str, object]] = {
    "ZeRO-2, adapters": {"zero": {"stage": 2}, "lora": {"rank": 4}},
    "ZeRO-3, adapters": {"zero": {"stage": 3, "settings": SHARD_ALL}, "lora": {"rank": 4}, "reference": "initial"},
}
CRITICS: dict[str, dict[str, object]] = {
    "ZeRO-2, critic": {"zero": {"stage": 2}, "critic": {}},
    "ZeRO-3, critic": {"zero": {"stage": 3, "settings": SHARD_ALL}, "critic": {}},
}
BFLOAT16: dict[str, object] = {"zero": {"stage": 2, "bfloat16": True}}
Alone = tuple[list[float], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def alone() -> Alone:
    """Losses and weights of one rank with torch."""
    learner = Learner(qwen3(), CONFIG)
    return train(learner), learner.model.state_dict()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What two ranks have left, by the setting; one job trains all of them, since it takes seconds to start."""
    folder = tmp_path_factory.mktemp("zero")
    settings = {**EXACT, **ADAPTERS, **CRITICS, "bfloat16": BFLOAT16}
    run_job(folder, *(json.dumps({"backend": "deepspeed", **changes}) for changes in settings.values()))
    return {name: folder / str(place) for place, name in enumerate(settings)}


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=atol, rtol=0)


@pytest.mark.parametrize("setting", EXACT)
def test_two_ranks_give_the_weights_of_one_with_samples_that_do_not_divide(
    setting: str, jobs: dict[str, Path], alone: Alone
) -> None:
    told = torch.load(jobs[setting] / "rank0.pt")
    equal(told["weights"], alone[1])
    assert told["losses"] == torch.load(jobs[setting] / "rank1.pt")["losses"] == pytest.approx(alone[0], abs=1e-5)


@pytest.mark.parametrize("setting", EXACT)
def test_a_checkpoint_resumes_on_the_same_ranks(setting: str, jobs: dict[str, Path], alone: Alone) -> None:
    told = torch.load(jobs[setting] / "rank0.pt")
    assert told["resumed_losses"] == pytest.approx(alone[0][SAVED_AT:], abs=1e-5)
    equal(told["resumed_weights"], alone[1])


@pytest.mark.parametrize("setting", EXACT)
def test_a_checkpoint_of_two_ranks_resumes_on_one_with_torch(setting: str, jobs: dict[str, Path], alone: Alone) -> None:
    """Whole tensors by name: the machine that opens it need not look like the one that wrote it."""
    loaded = checkpoint.load_newest(jobs[setting] / "checkpoints")
    assert loaded is not None
    learner = Learner(qwen3(seed=99), CONFIG)
    learner.load_state_dict(loaded[1])
    assert train(learner, first=SAVED_AT) == pytest.approx(alone[0][SAVED_AT:], abs=1e-5)
    equal(learner.model.state_dict(), alone[1])


@pytest.mark.parametrize("setting", ADAPTERS)
def test_adapters_over_a_base_in_shards_are_those_of_one_rank(setting: str, jobs: dict[str, Path]) -> None:
    """Only what is trained is gathered for a version and saved; a checkpoint resumes on one rank with torch."""
    config = CONFIG.model_copy(update={"lora": LoraConfig(rank=4)})
    learner = Learner(qwen3(), config)
    losses = train(learner)
    told = torch.load(jobs[setting] / "rank0.pt")
    equal(told["weights"], learner.weights(torch.float32))
    assert told["losses"] == pytest.approx(losses, abs=1e-5)
    assert told["resumed_losses"] == pytest.approx(losses[SAVED_AT:], abs=1e-5)
    equal(told["resumed_weights"], learner.weights(torch.float32))
    loaded = checkpoint.load_newest(jobs[setting] / "checkpoints")
    assert loaded is not None
    assert loaded[1]["model"].keys() == learner.state_dict()["model"].keys()
    resumed = Learner(qwen3(), config)
    resumed.load_state_dict(loaded[1])
    assert train(resumed, first=SAVED_AT) == pytest.approx(losses[SAVED_AT:], abs=1e-5)


@pytest.mark.parametrize("setting", CRITICS)
def test_a_critic_beside_a_policy_in_shards_is_that_of_one_rank(setting: str, jobs: dict[str, Path]) -> None:
    """It lies whole on every rank, with an optimizer and a checkpoint of its own; one rank with torch resumes it."""
    config = CONFIG.model_copy(update={"critic": CriticConfig()})
    learner = Learner(qwen3(), config)
    losses = train(learner)
    told = torch.load(jobs[setting] / "rank0.pt")
    equal(told["weights"], learner.weights(torch.float32))
    assert told["losses"] == pytest.approx(losses, abs=1e-5)
    assert told["resumed_losses"] == pytest.approx(losses[SAVED_AT:], abs=1e-5)
    equal(told["resumed_weights"], learner.weights(torch.float32))
    loaded = checkpoint.load_newest(jobs[setting] / "checkpoints")
    assert loaded is not None
    resumed = Learner(qwen3(seed=99), config)
    resumed.load_state_dict(loaded[1])
    assert train(resumed, first=SAVED_AT) == pytest.approx(losses[SAVED_AT:], abs=1e-5)


@pytest.mark.parametrize("setting", CRITICS)
def test_a_critic_that_is_added_later_begins_with_the_policy_of_then(setting: str, jobs: dict[str, Path]) -> None:
    told = torch.load(jobs[setting] / "rank0.pt")["added"]
    loaded = checkpoint.load_newest(jobs[setting] / "checkpoints")
    assert loaded is not None
    learner = Learner(qwen3(seed=99), CONFIG.model_copy(update={"critic": CriticConfig()}))
    learner.load_state_dict({name: part for name, part in loaded[1].items() if name != "critic"})
    assert told == pytest.approx(train(learner, first=SAVED_AT), abs=1e-5)


def test_bfloat16_trains_in_the_same_direction_and_keeps_float32_masters(jobs: dict[str, Path], alone: Alone) -> None:
    """What is published is rounded, what is saved is not."""
    told = torch.load(jobs["bfloat16"] / "rank0.pt")
    start = qwen3().state_dict()
    moved, expected = (
        torch.cat([(weights[name] - start[name]).flatten() for name in start])
        for weights in (told["weights"], alone[1])
    )
    assert torch.nn.functional.cosine_similarity(moved, expected, dim=0) > 0.8
    loaded = checkpoint.load_newest(jobs["bfloat16"] / "checkpoints")
    assert loaded is not None
    saved = loaded[1]["model"].values()
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved)
