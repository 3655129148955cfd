"""The reward worker on the bus: finished samples in, verdicts out.

A function that fails for one sample gives that sample a verdict. A function that fails for all is a bug of its owner:
then nothing is scored, the samples go back, and the run stops with a sentence, to be resumed when it is mended.

Which of the two it is, is told by the failures in a row: of a function that never worked a few are enough. One that did
work may meet a run of bad samples, and those of one prompt fail together, so there the groups count.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import structlog

from actors.gauges import Gauges
from actors.reward.config import RewardConfig
from actors.reward.verdict import RewardRequest, Verdict
from bus.port import Bus, Delivery
from bus.shell import HandBack, serve
from bus.table import CONTROL, REWARD_WORKERS
from schemas import Control, MalformedMessage, Message, Rollout, Scored, UserError
from schemas.errors import mend_and_resume

log = structlog.get_logger()

FAILURES_MAX = 8  # in a row, before a function that never worked is held to be broken
FAILED_GROUPS_MAX = 16  # different ones in a row, before one that did work is: no group of it had a verdict


class PoolPort(Protocol):
    """What scores; `actors.reward.pool.RewardPool` is it."""

    digest: str
    """Of the function as it is loaded now."""

    async def start(self) -> None:
        """Begin to serve."""

    async def score(self, request: RewardRequest) -> Verdict:
        """Score one sample; every failure is a verdict."""

    async def reload(self) -> str:
        """Load the function from its files anew; its digest. Raises `UserError`, and the old one stays."""

    async def close(self) -> None:
        """End, with whatever is being scored."""


class RewardWorker:
    """Scores rollouts with a pool of killable processes."""

    def __init__(self, bus: Bus, config: RewardConfig, pool: PoolPort, name: str) -> None:
        self.bus = bus
        self.config = config
        self.pool = pool
        self.name = name
        self._in_flight = 0
        self._scored = 0
        self._failed = 0
        self._in_a_row = 0
        self._failed_groups: set[int] = set()  # in a row
        self._reloaded: dict[str, Any] = {}
        self._ever_scored = False
        self._broken: asyncio.Future[UserError] | None = None
        self._stop = asyncio.Event()
        self.gauges = Gauges(bus, name, "reward", self._read_gauges)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`. Raises `UserError` if the reward function is broken."""
        self._broken = asyncio.get_running_loop().create_future()
        self._stop = stop
        await self.pool.start()
        self.gauges.pause("rollouts")
        room = 2 * self.config.children + 2
        try:
            async with self.gauges.beating():
                serving = asyncio.create_task(
                    serve(self.bus, REWARD_WORKERS, self._handle, room=lambda: room, stop=stop, name=self.name)
                )
                obeying = asyncio.create_task(self._obey(), name=f"{self.name} follows control")
                either: tuple[asyncio.Future[Any], ...] = (serving, self._broken, obeying)
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    broken = self._broken.done()
                    if obeying.done():
                        stop.set()
                    await serving
                    if obeying.done():
                        obeying.result()
                finally:
                    obeying.cancel()
                    await asyncio.gather(obeying, return_exceptions=True)
                if broken:
                    raise self._broken.result()
        finally:
            await self.pool.close()
            await self.bus.beat(self.gauges.beat_now())  # the children have ended, so that their CPU is known

    async def _handle(self, message: Message, delivery: Delivery) -> Sequence[Message] | HandBack:
        assert isinstance(message, Rollout)
        assert self._broken is not None
        if self._broken.done():
            return HandBack([])
        if message.reward is not None:  # that tells nothing of the function
            self._scored += 1
            return [scored_of(message, delivery.entry.seq, own_verdict(message), self.name)]
        while True:
            verdict = await self._score(message)
            if verdict.status == "scored":
                self._scored += 1
                self._in_a_row = 0
                self._failed_groups.clear()
                self._ever_scored = True
                break
            self._tell(message, verdict)
            if self._gone() and not self._broken.done():
                self._broken.set_result(self._sentence(verdict))
                self._stop.set()  # at once: what is handed back would come again
            if self._broken.done():
                return HandBack([])
            if self._ever_scored:
                break
            # As long as it never worked, blame the function and not the sample. It is asked again here: each time that
            # a message is handed back counts as a delivery, and of these it has not many.
        return [scored_of(message, delivery.entry.seq, verdict, self.name)]

    def _tell(self, message: Rollout, verdict: Verdict) -> None:
        """Count a failure, and name it."""
        self._failed += 1
        self._in_a_row += 1
        self._failed_groups.add(message.group_id)
        log.warning(
            "sample_not_scored",
            worker=self.name,
            sample=message.sample_id,
            verdict=verdict.status,
            detail=verdict.detail,
            attempts=verdict.attempts,
            in_a_row=self._in_a_row,
            digest=verdict.digest,
        )

    def _gone(self) -> bool:
        """Whether the function as a whole is to blame."""
        if self._ever_scored:
            return len(self._failed_groups) >= FAILED_GROUPS_MAX
        return self._in_a_row >= FAILURES_MAX

    async def _obey(self) -> None:
        """Load the function anew when control asks for it. What was asked before we began is loaded already."""
        start = (await self.bus.info(CONTROL)).last_seq + 1
        async for entry in self.bus.read(CONTROL, start):
            with contextlib.suppress(MalformedMessage):
                message = entry.message()
                if isinstance(message, Control) and message.action == "reload":
                    await self._reload(entry.seq)

    async def _reload(self, seq: int) -> None:
        before = self.pool.digest
        try:
            after = await self.pool.reload()
        except UserError as error:
            log.error("reward_reload_failed", worker=self.name, kept=before, error=str(error))
            self._reloaded = {"reload_seq": seq, "reload_error": str(error), "digest_before": before}
            return
        self._in_a_row = 0
        self._failed_groups.clear()
        log.info("reward_reloaded", worker=self.name, before=before, digest=after)
        self._reloaded = {"reload_seq": seq, "reload_error": "", "digest_before": before}

    async def _score(self, message: Rollout) -> Verdict:
        if self._in_flight == 0:
            self.gauges.resume()
        self._in_flight += 1
        try:
            return await self.pool.score(RewardRequest.of(message))
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self.gauges.pause("rollouts")

    def _sentence(self, verdict: Verdict) -> UserError:
        what = {
            "timeout": f"took longer than reward.timeout_s = {self.config.timeout_s:g} s",
            "error": f"raised {verdict.detail}",
            "invalid": f"returned no finite number ({verdict.detail})",
        }[verdict.status]
        groups = f", for {len(self._failed_groups)} groups" if self._ever_scored else ""
        return UserError(
            f"The reward function {self.config.function} {what} {self._in_a_row} times in a row{groups}.",
            mend_and_resume("what has no verdict yet is kept and will be scored then"),
        )

    def _read_gauges(self) -> dict[str, Any]:
        return {
            "scored": self._scored,
            "failed": self._failed,
            "failed_in_a_row": self._in_a_row,
            "in_flight": self._in_flight,
            "reward_digest": self.pool.digest,
            **self._reloaded,
        }


def own_verdict(rollout: Rollout) -> Verdict:
    """The verdict that an episode has given itself."""
    return Verdict(
        "scored",
        rollout.reward,
        token_rewards=tuple(rollout.token_rewards.tolist()),
        step_ends=tuple(rollout.step_ends.tolist()),
    )


def scored_of(rollout: Rollout, seq: int, verdict: Verdict, worker: str = "") -> Scored:
    """The message that tells a verdict on the rollout at `seq`."""
    again = f" ({verdict.attempts} attempts)" if verdict.reward is None and verdict.attempts > 1 else ""
    return Scored(
        group_id=rollout.group_id,
        index=rollout.index,
        group_size=rollout.group_size,
        rollout_seq=seq,
        prompt_length=len(rollout.prompt_tokens),
        segments=rollout.segments,
        finish=rollout.finish,
        verdict=verdict.status,
        reward=verdict.reward,
        parts=verdict.parts,
        detail=(verdict.detail + again)[:4000],
        seconds=verdict.seconds,
        worker=worker,
        token_rewards=np.array(verdict.token_rewards, "<f4"),
        step_ends=np.array(verdict.step_ends, "<i4"),
        reward_digest=verdict.digest,
        observations=rollout.observations,
    )
