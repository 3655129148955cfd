"""The log-probabilities that a trainer computes of recorded tokens, by its own forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from actors.trainer.forward import ScoredTokens
    from actors.trainer.learner import Learner


def trainer_logprobs(learner: Learner, sequences: Sequence[ScoredTokens]) -> list[npt.NDArray[np.float32]]:
    """float32 [n] for each sequence, of its n scored tokens: packed and computed as in a training step."""
    import torch

    from actors.trainer.forward import collate, model_traits, response_logprobs
    from actors.trainer.packing import pack

    config = learner.config
    shared = model_traits(learner.model).can_share_rows(max(map(len, sequences), default=0))
    packed = pack(
        [len(sequence) for sequence in sequences],
        micro_batch_tokens=config.micro_batch_tokens,
        row_tokens=config.row_tokens,
        share_rows=shared,
    )
    autocast = torch.bfloat16 if config.autocast == "bfloat16" else None
    out: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(sequences)
    for rows in packed:
        batch = collate(rows, sequences, shared=shared, device=learner.model.device)
        with torch.no_grad():
            logprobs, _ = response_logprobs(learner.model, batch, learner.temperature, autocast=autocast)
        place = batch.sequence.cpu().numpy()
        values = logprobs.cpu().numpy()
        for at, index in enumerate(batch.sequences):
            out[index] = values[place == at]
    return out
