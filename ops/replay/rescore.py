"""Scoring recorded rollouts again, by the production pool of reward processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from actors.reward.actor import own_verdict
from actors.reward.pool import RewardPool
from actors.reward.verdict import RewardRequest, Verdict
from bus.port import Entry
from bus.table import ROLLOUTS, SCORED
from ops.log_source import LogSource, initial_model_of
from ops.recipe import Recipe
from ops.text import decoder_of
from schemas import MalformedMessage, Rollout, Scored

WINDOW = 64  # rollouts read and scored together


@dataclasses.dataclass(frozen=True, slots=True)
class Rescored:
    """A rollout with the verdict in the log, if it has one, and the one that it gets now."""

    sample_id: str
    rollout_seq: int
    before: Verdict | None
    after: Verdict
    own: bool = False
    """Whether its episode gave the reward itself, so that no function was asked."""

    @property
    def changed(self) -> bool:
        """Whether status, reward, process rewards or a part that both have differ. Without a recorded verdict there is
        no change."""
        old, new = self.before, self.after
        if old is None:
            return False
        return (old.status, old.reward) != (new.status, new.reward) or self.changed_process or bool(self.changed_parts)

    @property
    def changed_process(self) -> bool:
        """Whether process rewards differ, or the steps that they are of."""
        old, new = self.before, self.after
        return old is not None and (old.token_rewards, old.step_ends) != (new.token_rewards, new.step_ends)

    @property
    def changed_parts(self) -> list[str]:
        """The parts of both verdicts whose values differ. Parts that only one of them has are no change of mind."""
        old = self.before.parts if self.before is not None else {}
        new = self.after.parts
        return sorted(name for name in old.keys() & new.keys() if old[name] != new[name])


@contextlib.asynccontextmanager
async def reward_pool(recipe: Recipe, source: LogSource) -> AsyncIterator[RewardPool]:
    """The recipe's reward function, ready to be asked about rollouts of the log. Raises `UserError` if it cannot be
    loaded."""
    with tempfile.TemporaryDirectory() as aside:
        decoder = decoder_of(lambda: initial_model_of(source, Path(aside) / "initial"))
        pool = RewardPool(recipe.reward, recipe.base, decoder)
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()


async def score_again(pool: RewardPool, rollout: Rollout) -> Verdict:
    """The verdict on a recorded rollout, as the reward worker comes to it: an episode's own, or the function's."""
    if rollout.reward is not None:
        return own_verdict(rollout)
    return await pool.score(RewardRequest.of(rollout))


async def rescore_log(source: LogSource, pool: RewardPool) -> AsyncIterator[Rescored]:
    """Every rollout of the log, scored again: in the order of the recorded verdicts, then those that have none.

    Entries that do not decode are left out: they were dead-lettered by the workers, too.
    """
    seen = bytearray((await source.info(ROLLOUTS)).last_seq + 1)  # by sequence: has a verdict
    window: list[Scored] = []
    async for entry in source.read(SCORED):
        with contextlib.suppress(MalformedMessage):
            message = entry.message()
            if isinstance(message, Scored) and message.rollout_seq < len(seen):
                seen[message.rollout_seq] = 1
                window.append(message)
        if len(window) == WINDOW:
            async for one in _scored(source, pool, window):
                yield one
            window = []
    async for one in _scored(source, pool, window):
        yield one
    if 0 not in seen[1:]:
        return
    entries: list[Entry] = []
    async for entry in source.read(ROLLOUTS):
        if not seen[entry.seq]:
            entries.append(entry)
        if len(entries) == WINDOW:
            for one in await _all(pool, entries, {}):
                yield one
            entries = []
    for one in await _all(pool, entries, {}):
        yield one


async def _scored(source: LogSource, pool: RewardPool, window: Sequence[Scored]) -> AsyncIterator[Rescored]:
    verdicts = {scored.rollout_seq: scored for scored in window}
    for one in await _all(pool, await source.get(ROLLOUTS, [*verdicts]), verdicts):
        yield one


async def _all(pool: RewardPool, entries: Sequence[Entry], verdicts: dict[int, Scored]) -> list[Rescored]:
    rollouts: list[tuple[int, Rollout]] = []
    for entry in entries:
        with contextlib.suppress(MalformedMessage):
            message = entry.message()
            if isinstance(message, Rollout):
                rollouts.append((entry.seq, message))
    now = await asyncio.gather(*(score_again(pool, rollout) for _, rollout in rollouts))
    return [
        Rescored(rollout.sample_id, seq, _verdict_of(verdicts.get(seq)), verdict, rollout.reward is not None)
        for (seq, rollout), verdict in zip(rollouts, now, strict=True)
    ]


def _verdict_of(scored: Scored | None) -> Verdict | None:
    if scored is None:
        return None
    return Verdict(
        scored.verdict,
        scored.reward,
        dict(scored.parts),
        scored.detail,
        token_rewards=tuple(scored.token_rewards.tolist()),
        step_ends=tuple(scored.step_ends.tolist()),
        digest=scored.reward_digest,
    )
