"""The program of one rank in tests with real processes: torchrun starts it, it trains and leaves what came of it.

python -m torch.distributed.run --nproc-per-node 2 -m tests.actors.rank_job FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from actors.trainer import checkpoint
from actors.trainer.config import TrainerConfig
from actors.trainer.learner import Learner
from actors.trainer.torch_ranks import TorchRanks
from tests.actors.rank_threads import share
from tests.actors.tiny_models import qwen3, samples

STEPS, SAVED_AT = 5, 3
CONFIG = TrainerConfig(lr=1e-3, minibatches=2, micro_batch_tokens=60, weight_decay=0.1)


def train(learner: Learner, first: int = 0, last: int = STEPS, saved: Path | None = None) -> list[float]:
    """Losses of the steps; 3 groups of 3 samples, which two ranks cannot share evenly. Checkpoint at `SAVED_AT`."""
    losses = []
    for step in range(first, last):
        made = share(samples(3, 3, seed=step), learner.ranks.rank, learner.ranks.count)
        losses.append(learner.step(step, made)["loss"])
        if learner.steps_done == SAVED_AT and saved is not None:
            state = learner.state_dict()
            if learner.ranks.rank == 0:
                checkpoint.save(saved, SAVED_AT, state, keep=1)
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, ranks = Path(sys.argv[1]), TorchRanks()
    learner = Learner(qwen3(), CONFIG, ranks=ranks)
    losses = train(learner, saved=folder / "checkpoints")
    torch.save({"losses": losses, "weights": learner.model.state_dict()}, folder / f"rank{ranks.rank}.pt")
    ranks.close()
