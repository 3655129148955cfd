"""Process rewards, as a trainer rank fetches them: from the verdicts that a batch names. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from actors.trainer.config import SEQUENCE_LOSSES, TrainerConfig
from bus.port import Entry
from bus.table import SCORED, Stream
from schemas import Batch, Scored, UserError, sample_id

PURGED_REMEDY = "The log was purged beyond the newest checkpoint; start a new run from the exported model."


def check_process_rewards(batch: Batch, config: TrainerConfig) -> None:
    """Raises `UserError` if the batch has process rewards, and a loss that would lose them."""
    if len(batch.scored_seqs) and config.loss in SEQUENCE_LOSSES and config.advantage.function is None:
        raise UserError(
            f"Batch {batch.step} has process rewards, and trainer.loss {config.loss} takes the mean advantage of an "
            "answer for all its tokens: which step earned them would be lost.",
            "Set trainer.loss to decoupled_ppo or another loss of tokens, or let the reward function return one "
            "number; then continue with --resume.",
        )


class Log(Protocol):
    """What entries are fetched from: a bus, or a log that is only read."""

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        """The entries at these sequences, in this order. Raises `LookupError` if one is not there."""


async def verdicts_of(log: Log, batch: Batch, share: npt.NDArray[np.int64]) -> list[Scored | None]:
    """The verdict with process rewards of each sample of this rank's `share`, None for those without.

    Raises `UserError` if the log does not hold what the batch names.
    """
    out: list[Scored | None] = [None] * len(share)
    if not len(batch.scored_seqs):
        return out
    having: npt.NDArray[Any] = np.flatnonzero(batch.scored_seqs[share])
    try:
        entries = await log.get(SCORED, batch.scored_seqs[share[having]].tolist())
    except LookupError as error:
        raise UserError(
            f"Batch {batch.step} names a verdict that the log no longer holds: {error}.",
            PURGED_REMEDY,
        ) from error
    for place, entry in zip(having.tolist(), entries, strict=True):
        scored, i = entry.message(), int(share[place])
        sample = int(batch.group_ids[i]), int(batch.indices[i])
        if (
            not isinstance(scored, Scored)
            or (scored.group_id, scored.index) != sample
            or scored.rollout_seq != batch.rollout_seqs[i]
            or not len(scored.token_rewards)
        ):
            raise UserError(
                f"Batch {batch.step} names verdict {entry.seq} for the process rewards of {sample_id(*sample)}; it has "
                "none.",
                "The log is damaged; `rollstream audit` tells more.",
            )
        out[place] = scored
    return out
