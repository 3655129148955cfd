"""Ranks as real processes over gloo: threads of one process share more than a job ever will."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.trainer import checkpoint
from actors.trainer.learner import Learner
from tests.actors.rank_job import CONFIG, SAVED_AT, run_job, train
from tests.actors.tiny_models import qwen3


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one rank."""
    learner = Learner(qwen3(), CONFIG)
    return train(learner), learner.model.state_dict()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have left."""
    folder = tmp_path_factory.mktemp("job")
    run_job(folder)
    return folder / "0"


def test_two_processes_give_the_weights_of_one_with_samples_that_do_not_divide(
    job: Path, alone: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    losses, weights = alone
    told = [torch.load(job / f"rank{rank}.pt") for rank in range(2)]
    for name, tensor in weights.items():
        torch.testing.assert_close(told[0]["weights"][name], tensor, atol=1e-5, rtol=0)
    assert told[0]["losses"] == told[1]["losses"] == pytest.approx(losses, abs=1e-5)


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_the_losses_continue(
    job: Path, alone: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    """A node may be gone for good."""
    losses, weights = alone
    loaded = checkpoint.load_newest(job / "checkpoints")
    assert loaded is not None
    assert loaded[0] == SAVED_AT
    learner = Learner(qwen3(seed=99), CONFIG)
    learner.load_state_dict(loaded[1])
    assert train(learner, first=SAVED_AT) == pytest.approx(losses[SAVED_AT:], abs=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(learner.model.state_dict()[name], tensor, atol=1e-5, rtol=0)
