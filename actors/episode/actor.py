"""The episode worker on the bus: prompts in, the turns of their episodes out and back, whole rollouts out.

It holds no state that the log lacks. When it is killed its prompts go to another worker, which runs their episodes from
the start; what they ask again is answered from the log at once, so they are soon where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Sequence
from typing import Any

import structlog

from actors import clock
from actors.ended import Ended
from actors.episode.builtin import Episode
from actors.episode.capacity import LOOK_S, LOOK_SOON_S, Capacity
from actors.episode.config import EpisodeConfig
from actors.episode.conversation import Tokenizer
from actors.episode.deaths import DEATHS_MAX, Deaths
from actors.episode.encoding import Encoding
from actors.episode.exchange import Exchange
from actors.episode.played import in_words, played
from actors.episode.policy import GivenUp, Policy
from actors.episode.running import Marked
from actors.episode.trajectory import EmptyTrajectory, Said, rollout_of
from actors.episode.watchdog import Watchdog
from actors.gauges import Gauges
from bus.port import Bus, BusFull, BusUnavailable, Delivery
from bus.shell import HandBack, serve
from bus.table import ROLLOUT_WORKERS, TURN_WORKERS
from schemas import Dropped, DropReason, Message, Prompt, UserError
from schemas.errors import mend_and_resume

log = structlog.get_logger()

RETRY_S = 0.2  # before a function that failed is tried again
FAILURES_MAX = 8  # in a row, before any success: then the function as a whole is held to be broken
DETAIL_CHARS_MAX = 4000


class EpisodeWorker:
    """Runs an episode function for each prompt.

    One that is not replayable begins anew after a crash, without its old answers. `max_new_tokens` is the recipe's
    bound of one answer. `deaths` are those of the workers before it.
    """

    def __init__(
        self,
        bus: Bus,
        config: EpisodeConfig,
        function: Episode,
        tokenizer: Tokenizer,
        max_new_tokens: int,
        name: str,
        deaths: Deaths | None = None,
    ) -> None:
        self.bus = bus
        self.config = config
        self.name = name
        self._deaths = deaths or Deaths(bus, config.what, config.at_once)
        self._function = function
        self._tokenizer = tokenizer
        self._encoding = Encoding(tokenizer)
        self._max_new_tokens = max_new_tokens
        self._replayable = function.replayable
        self._keeps_time = getattr(function, "keeps_time", False)
        self._exchange = Exchange(bus, name)
        self._capacity = Capacity(config.at_once)
        self._filled = asyncio.Event()
        self._ended = Ended(bus)
        self._leaving: asyncio.Future[None] | None = None
        self._running = 0
        self._finished = 0
        self._cut = 0
        self._failed = 0
        self._in_a_row = 0
        self._fruitless_groups: set[int] = set()  # before the first success
        self._turns = 0
        self._reused = 0
        self.gauges = Gauges(bus, name, "episode", self._read_gauges)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`; then give back what is unfinished. Raises `UserError` if the function is broken."""
        self._leaving = asyncio.get_running_loop().create_future()
        await self._deaths.start()
        await self._exchange.start()
        await self._function.start()
        async with self.gauges.beating():
            self.gauges.pause("prompts")
            log.info("episode_worker_started", worker=self.name, what=self.config.what)
            helpers = [
                asyncio.create_task(self._exchange.follow(), name=f"{self.name} hears answers"),
                asyncio.create_task(self._exchange.hear(), name=f"{self.name} hears of tokens"),
                asyncio.create_task(self._ended.follow(), name=f"{self.name} follows drops"),
                asyncio.create_task(self._look(), name=f"{self.name} looks at the turns"),
            ]
            serving = asyncio.create_task(
                serve(
                    self.bus,
                    ROLLOUT_WORKERS,
                    self._handle,
                    room=lambda: min(self._capacity.room, self._deaths.most),
                    stop=stop,
                    name=self.name,
                )
            )
            stopping = asyncio.create_task(stop.wait())
            try:
                with Watchdog(self._deaths.running, self.config.held_up_s, self.name):
                    await asyncio.wait([serving, stopping, *helpers], return_when=asyncio.FIRST_COMPLETED)
                    for helper in helpers:
                        if helper.done():
                            helper.result()  # follows for ever, so it failed
                    if not self._leaving.done():
                        self._leaving.set_result(None)
                    await serving
            finally:
                for task in (serving, stopping, *helpers):
                    task.cancel()
                await asyncio.gather(serving, stopping, *helpers, return_exceptions=True)
                self._deaths.close()
                self._encoding.close()
                await self._function.close()

    async def _look(self) -> None:
        """See how the engines keep up with the turns, for ever; not in step with other workers."""
        rng, now_s = random.Random(self.name), asyncio.get_running_loop().time
        while True:
            self._filled.clear()
            waiting = (await self.bus.backlog(TURN_WORKERS)).pending
            self._capacity.looked(now_s(), self._running, waiting, self._exchange.answered)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S * rng.uniform(0.5, 1.5)):
                    await self._filled.wait()
                    await asyncio.sleep(LOOK_SOON_S)

    async def _handle(self, message: Message, delivery: Delivery) -> Sequence[Message] | HandBack:
        assert isinstance(message, Prompt)
        assert self._leaving is not None
        if self._running == 0:
            self.gauges.resume()
        self._running += 1
        if self._capacity.filled(self._running):
            self._filled.set()
        work = asyncio.ensure_future(self._ended.unless(message.sample_id, self._alive(message, delivery)))
        try:
            either: tuple[asyncio.Future[Any], ...] = (work, self._leaving)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return HandBack()
            outcome = work.result()
            return [outcome] if outcome is not None else []  # None: the sample has ended otherwise
        finally:
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
            self._running -= 1
            if self._running == 0:
                self.gauges.pause("prompts")

    async def _alive(self, prompt: Prompt, delivery: Delivery) -> Message:
        """What comes of a prompt, or that its episode has ended worker after worker."""
        deaths = await self._deaths.of(prompt.sample_id) if delivery.deliveries > 1 else []
        if len(deaths) >= DEATHS_MAX:
            detail = f"its worker {deaths[-1]} while it ran, {len(deaths)} times in a row"
            return self._dropped(prompt, (), "error", detail)
        async with self._deaths.in_quiet() if deaths else self._deaths.beside_others():
            with self._deaths.running.episode(prompt) as slot:
                return await self._episode(prompt, delivery, slot)

    async def _episode(self, prompt: Prompt, delivery: Delivery, slot: int) -> Message:
        """The rollout of a prompt, or why there is none."""
        arrived_s = clock.monotonic_s()
        again = delivery.deliveries - 1
        tries = self.config.retries + 1
        failure = ""
        deadline = asyncio.timeout(None if self._keeps_time else self.config.timeout_s)
        try:
            async with deadline:
                for retry in range(tries):
                    attempt = 0 if self._replayable else again * tries + retry
                    most = self._max_new_tokens
                    policy = Policy(prompt, self._exchange, self._tokenizer, self._encoding, self.config, most, attempt)
                    try:
                        work = played(self._function, prompt, policy, functools.partial(self._cut_short, prompt))
                        trajectory = await Marked(self._deaths.running, slot, work)
                        rollout = rollout_of(
                            prompt,
                            trajectory,
                            per_turn=self.config.samples == "turn",
                            worker=self.name,
                            seconds=clock.monotonic_s() - arrived_s,
                            resumed=again,
                        )
                    except (UserError, BusFull, BusUnavailable):  # none of them is the function's fault
                        raise
                    except GivenUp as error:
                        return self._dropped(prompt, policy.said, error.reason, str(error))
                    except EmptyTrajectory as error:
                        self._fruitless(prompt, str(error))
                        reason: DropReason = "invalid" if policy.said else "bad_prompt"
                        return self._dropped(prompt, policy.said, reason, str(error))
                    except Exception as error:
                        failure = in_words(error, self._function.place)
                        log.warning(
                            "episode_failed", worker=self.name, sample=prompt.sample_id, attempt=retry, error=failure
                        )
                        self._tell(prompt, policy, again)
                        await self._broken(failure)
                        if retry + 1 < tries:
                            await asyncio.sleep(RETRY_S)
                        continue
                    self._tell(prompt, policy, again)
                    self._finished += 1
                    self._in_a_row = 0
                    return rollout
        except TimeoutError:
            if not deadline.expired():
                raise
            late = f"longer than episode.timeout_s {self.config.timeout_s:g}"
            if policy.asking:  # it is the model that is slow, or not there
                late += ", in the end waiting for the model"
            else:
                self._fruitless(prompt, late)
            return self._dropped(prompt, policy.said, "timeout", late)
        return self._dropped(prompt, policy.said, "error", failure)

    def _cut_short(self, prompt: Prompt, reason: str) -> None:
        self._cut += 1
        log.info("episode_cut", worker=self.name, sample=prompt.sample_id, reason=reason)

    def _tell(self, prompt: Prompt, policy: Policy, again: int) -> None:
        """What became of an episode that had begun before."""
        self._turns += len(policy.said)
        self._reused += policy.log.reused
        if not again:
            return
        known = log.bind(worker=self.name, sample=prompt.sample_id)
        if not self._replayable:
            known.info("episode_restarted", turn=0, reason="its tools cannot be repeated")
        elif policy.log.diverged is not None:
            known.info(
                "episode_restarted",
                turn=policy.log.diverged,
                reason="it asked something else than before",
                turns_reused=policy.log.reused,
            )
        else:
            known.info("episode_resumed", turns_reused=policy.log.reused)

    async def _broken(self, failure: str) -> None:
        """Raises `UserError` once the function has failed again and again and never succeeded."""
        self._failed += 1
        self._in_a_row += 1
        if self._in_a_row >= FAILURES_MAX and not self._finished:
            raise UserError(
                f"The episode {self.config.what} failed {self._in_a_row} times in a row: {failure}.",
                mend_and_resume("the samples are kept"),
            )

    def _fruitless(self, prompt: Prompt, failure: str) -> None:
        """Raises `UserError` once episodes of that many groups have come to nothing, and none to anything."""
        if self._finished:
            return
        self._fruitless_groups.add(prompt.group_id)
        if len(self._fruitless_groups) >= FAILURES_MAX:
            raise UserError(
                f"The episode {self.config.what} made nothing to train of {FAILURES_MAX} groups: {failure}.",
                mend_and_resume("what was dropped stays so"),
            )

    def _dropped(self, prompt: Prompt, said: Sequence[Said], reason: DropReason, detail: str) -> Dropped:
        tokens = sum(len(one.answer.tokens) for one in said)
        log.warning("episode_dropped", worker=self.name, sample=prompt.sample_id, reason=reason, detail=detail)
        return Dropped(
            group_id=prompt.group_id,
            index=prompt.index,
            reason=reason,
            tokens=tokens,
            detail=f"episode: {detail}"[:DETAIL_CHARS_MAX],
            worker=self.name,
        )

    def _read_gauges(self) -> dict[str, Any]:
        return {
            "running": self._running,
            "waiting": self._exchange.waiting,
            "finished": self._finished,
            "turns": self._turns,
            "reused_turns": self._reused,
            "cut": self._cut,
            "failed": self._failed,
        }
