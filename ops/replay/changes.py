"""What a replay does otherwise than the recorded run, and what it cannot."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bus.table import ROLLOUTS
from ops.log_source import LogSource
from ops.recipe import Recipe
from ops.replay.history import History, Phase
from schemas import Batch, Rollout, Scored, UserError

if TYPE_CHECKING:
    from actors.reward.pool import RewardPool

STALENESS = "controller.max_staleness"


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """Overrides such as `trainer.loss=ppo`, checked to be some that recorded data can answer."""

    overrides: tuple[str, ...] = ()

    @property
    def max_staleness(self) -> bool:
        """Whether the bound on staleness is another."""
        return any(override.partition("=")[0].strip() == STALENESS for override in self.overrides)

    def recipe(self, recipe: Recipe, run: str) -> Recipe:
        """The recipe with the changes. A function's file is looked for here first, then in its folder."""
        return recipe.changed([_found_here(override) for override in self.overrides], f"the recipe of {run}")

    def phases(self, history: History, start: int, stop: int) -> list[Phase]:
        """The steps before `start` as they were trained; from there on with the changes."""
        changed = [
            dataclasses.replace(phase, recipe=self.recipe(phase.recipe, history.run))
            for phase in history.phases(start, stop)
        ]
        return history.phases(0, start) + changed


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """`["runs/x", "trainer.lr=1e-4"]`, in any order, as the log that is meant (None: the newest run) and the overrides.

    Raises:
        UserError: two logs are meant.
    """
    targets = [one for one in arguments if "=" not in one or Path(one).exists()]
    if len(targets) > 1:
        raise UserError(
            f"{targets[0]} and {targets[1]} are two logs, and one is replayed.", "A change of the recipe is key=value."
        )
    return targets[0] if targets else None, [one for one in arguments if one not in targets]


def read_changes(overrides: Sequence[str], reward: bool, trainer: bool = True) -> Changes:
    """The changes that a person asks for; `reward` and `trainer` say which of the two are replayed.

    Raises:
        UserError: a key would change what was generated or chosen, which is recorded.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key == "base" or (trainer and (key.startswith("trainer.") or key == STALENESS)):
            continue
        if key.startswith("reward."):
            if reward:
                continue
            raise UserError(f"{override} changes nothing here: the rewards are the recorded ones.", "Add --rescore.")
        can = f"trainer.* and {STALENESS}, and reward.* with --rescore" if trainer else "reward.*"
        raise UserError(
            f"{key} cannot be changed in a replay: what was generated and batched is recorded.",
            f"What can: {can}; and base, the folder where function files are looked for.",
        )
    return Changes(tuple(overrides))


def _found_here(override: str) -> str:
    """A relative `reward.function=my.py:score` whose file stands in the current folder, with its whole path."""
    key, _, value = override.partition("=")
    file, colon, name = value.partition(".py:")
    path = Path(f"{file}.py").expanduser()
    if colon and path.is_file():
        return f"{key}={path.resolve()}:{name}"
    return override


class Rebatcher:
    """Recorded batches as another bound on staleness, or another reward, would have them; those before `start` stay.

    Samples to which the new reward gives no verdict are left out, as a run would drop them; `left_out` counts them.
    What a run would admit in their place is not in the recording.
    """

    def __init__(self, source: LogSource, start: int, max_staleness: int | None, pool: RewardPool | None) -> None:
        self.left_out = 0
        self._source = source
        self._start = start
        self._max_staleness = max_staleness
        self._pool = pool

    async def __call__(self, batch: Batch) -> tuple[Batch, Mapping[int, Scored]]:
        """The batch to train, and the new verdicts with process rewards, by the sequences under which it names them."""
        if batch.step < self._start:
            return batch, {}
        if self._max_staleness is not None:
            batch = dataclasses.replace(batch, max_staleness=self._max_staleness)
        return (batch, {}) if self._pool is None else await self._rescored(batch, self._pool)

    async def _rescored(self, batch: Batch, pool: RewardPool) -> tuple[Batch, Mapping[int, Scored]]:
        from actors.reward.actor import scored_of
        from ops.replay.rescore import score_again

        entries = await self._source.get(ROLLOUTS, batch.rollout_seqs.tolist())
        rollouts = [message for message in (entry.message() for entry in entries) if isinstance(message, Rollout)]
        verdicts = await asyncio.gather(*(score_again(pool, rollout) for rollout in rollouts))
        kept = [i for i, verdict in enumerate(verdicts) if verdict.reward is not None]
        if verdicts and not kept:
            raise UserError(
                f"The reward gives no verdict on any sample of batch {batch.step}: {verdicts[0].detail}.", "Mend it."
            )
        self.left_out += len(verdicts) - len(kept)
        anew = {
            seq: scored_of(rollouts[i], seq, verdicts[i])  # under the sequence of its rollout, which is its own as well
            for i, seq in enumerate(batch.rollout_seqs.tolist())
            if i in kept and verdicts[i].token_rewards
        }
        scored_seqs = [seq if seq in anew else 0 for seq in batch.rollout_seqs[kept].tolist()]
        rescored = dataclasses.replace(
            batch,
            scored_seqs=np.array(scored_seqs if anew else (), dtype=np.int64),
            group_ids=batch.group_ids[kept],
            indices=batch.indices[kept],
            rollout_seqs=batch.rollout_seqs[kept],
            lengths=batch.lengths[kept] if len(batch.lengths) else batch.lengths,
            rewards=np.array([verdicts[i].reward for i in kept], dtype=np.float64),
            seen={name: value for name, value in batch.seen.items() if name != "reward"},
        )
        return rescored, anew
