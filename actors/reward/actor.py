"""The reward worker on the bus: finished samples in, verdicts out.

A function that fails for one sample gives that sample a verdict. A function that fails for all is a bug of its owner:
then nothing is scored, the samples go back, and the run stops with a sentence, to be resumed when it is mended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from actors.gauges import Gauges
from actors.reward.config import RewardConfig
from actors.reward.verdict import RewardRequest, Verdict
from bus.port import Bus, Delivery
from bus.shell import HandBack, serve
from bus.table import REWARD_WORKERS
from schemas import Message, Rollout, Scored, UserError

FAILURES_MAX = 8  # in a row, before the function as a whole is held to be broken


class PoolPort(Protocol):
    """What scores; `actors.reward.pool.RewardPool` is it."""

    async def start(self) -> None:
        """Begin to serve."""

    async def score(self, request: RewardRequest) -> Verdict:
        """Score one sample; every failure is a verdict."""

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
        self._ever_scored = False
        self._broken: asyncio.Future[Verdict] | None = None
        self._stop = asyncio.Event()
        self.gauges = Gauges(bus, name, "reward", self._read_gauges)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`. Raises `UserError` if the reward function is broken."""
        self._broken = asyncio.get_running_loop().create_future()
        self._stop = stop
        await self.pool.start()
        room = 2 * self.config.children + 2
        try:
            async with self.gauges.beating():
                serving = asyncio.create_task(
                    serve(self.bus, REWARD_WORKERS, self._handle, room=lambda: room, stop=stop, name=self.name)
                )
                either: tuple[asyncio.Future[Any], ...] = (serving, self._broken)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                broken = self._broken.done()
                await serving
                if broken:
                    raise self._sentence(self._broken.result())
        finally:
            await self.pool.close()
            await self.bus.beat(self.gauges.beat_now())  # the children have ended, so that their CPU is known

    async def _handle(self, message: Message, delivery: Delivery) -> Sequence[Message] | HandBack:
        assert isinstance(message, Rollout)
        assert self._broken is not None
        if self._broken.done():
            return HandBack([])
        while True:
            verdict = await self._score(message)
            if verdict.status == "scored":
                self._scored += 1
                self._in_a_row = 0
                self._ever_scored = True
                break
            self._failed += 1
            self._in_a_row += 1
            if self._in_a_row >= FAILURES_MAX and not self._broken.done():
                self._broken.set_result(verdict)
                self._stop.set()  # at once: what is handed back would come again
            if self._broken.done():
                return HandBack([])
            if self._ever_scored:
                break
            # As long as it never worked, blame the function and not the sample. It is asked again here: each time that
            # a message is handed back counts as a delivery, and of these it has not many.
        return [scored_of(message, delivery.entry.seq, verdict, self.name)]

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
        return UserError(
            f"The reward function {self.config.function} {what} {FAILURES_MAX} times in a row.",
            "Mend it and continue with `rollstream run RECIPE --resume`; the samples are kept and will be scored then.",
        )

    def _read_gauges(self) -> dict[str, Any]:
        return {"scored": self._scored, "failed": self._failed, "in_flight": self._in_flight}


def scored_of(rollout: Rollout, seq: int, verdict: Verdict, worker: str = "") -> Scored:
    """The message that tells a verdict on the rollout at `seq`."""
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
        detail=verdict.detail[:4000],
        seconds=verdict.seconds,
        worker=worker,
        token_rewards=np.array(verdict.token_rewards, "<f4"),
        step_ends=np.array(verdict.step_ends, "<i4"),
    )
