"""The program of one rank in tests with real processes: torchrun starts it, it trains and leaves what came of it.

python -m torch.distributed.run --nproc-per-node 2 -m tests.actors.rank_job FOLDER [CHANGES OF THE CONFIG AS JSON ...]

Every further argument is one training; what it leaves lies in FOLDER/0, FOLDER/1 ...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from actors.trainer import checkpoint
from actors.trainer.config import TrainerConfig
from actors.trainer.learner import Learner
from actors.trainer.torch_ranks import TorchRanks
from tests.actors.rank_threads import share
from tests.actors.tiny_models import qwen3, samples

ROOT = Path(__file__).parents[2]
STEPS, SAVED_AT = 5, 3
CONFIG = TrainerConfig(
    lr=1e-3,
    minibatches=2,
    micro_batch_tokens=60,
    weight_decay=0.1,
    grad_clip=4.0,  # some steps are clipped, some are not
    adam_eps=1e-3,  # or steps would hardly depend on how large the gradients are
)


def train(learner: Learner, first: int = 0, last: int = STEPS, saved: Path | None = None) -> list[float]:
    """Losses of the steps; 3 groups of 3 samples, which two ranks cannot share evenly. Checkpoint at `SAVED_AT`."""
    losses = []
    for step in range(first, last):
        made = share(samples(3, 3, seed=step), learner.ranks.rank, learner.ranks.count)
        losses.append(learner.step(step, made)["loss"])
        if learner.steps_done == SAVED_AT and saved is not None:
            state = learner.state_dict()
            if learner.ranks.rank == 0:
                checkpoint.save(saved, SAVED_AT, state)
    return losses


def run_job(folder: Path, *changes: str) -> None:
    """Run this program as two processes; fails with what they said if they fail."""
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [*started, "--nproc-per-node=2", "--module", "tests.actors.rank_job", str(folder), *changes],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, capture_output=True,
        text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = TorchRanks()
    for place, changes in enumerate(sys.argv[2:] or ["{}"]):
        folder = Path(sys.argv[1]) / str(place)
        folder.mkdir(exist_ok=True)
        config = TrainerConfig(**{**CONFIG.model_dump(), **json.loads(changes)})
        learner = Learner(qwen3(), config, ranks=ranks)
        losses = train(learner, saved=folder / "checkpoints")
        loaded = checkpoint.load_newest(folder / "checkpoints")
        assert loaded is not None
        resumed = Learner(qwen3(seed=99 if config.lora is None else 0), config, ranks=ranks)  # a base is not saved
        resumed.load_state_dict(loaded[1])
        told = {
            "losses": losses,
            "weights": learner.weights(torch.float32),
            "resumed_losses": train(resumed, first=SAVED_AT),
            "resumed_weights": resumed.weights(torch.float32),
        }
        if config.critic is not None:
            added = Learner(qwen3(seed=99), config, ranks=ranks)
            added.load_state_dict({name: part for name, part in loaded[1].items() if name != "critic"})
            told["added"] = train(added, first=SAVED_AT)
        torch.save(told, folder / f"rank{ranks.rank}.pt")
    ranks.close()
