"""The rollout worker on the bus: prompts in, finished samples out, new weights in between; or turns in, answers out.

It holds no state that the log lacks. On a stop it hands its unfinished samples over: `Partial`s are stored, the prompts
go back at once, and whoever gets them continues from there, token for token on the same random stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import structlog

from actors import clock
from actors.ended import Ended
from actors.gauges import Gauges
from actors.rollout.config import RolloutConfig
from actors.rollout.early_stop import EarlyStop, Guard
from actors.rollout.engine import Engine, EngineError, Request, Sampling, WeightsError
from actors.rollout.turn_watch import Outcome, TurnWatch
from actors.rollout.turns import Made, name_of, partial_of, prefix_of, refusal_of, result_of, sampling_of, text_of
from bus.port import Bus, Delivery, Entry
from bus.shell import HandBack, Rejected, Retry, serve
from bus.table import ANSWERS, PARTIALS, ROLLOUT_WORKERS, TURN_WORKERS, WEIGHTS, Consumer
from bus.weights import Local
from bus.weights import WeightsError as CannotBeHad
from schemas import MalformedMessage, Message, Partial, Prompt, Turn, WeightVersion

log = structlog.get_logger()

VERSION_WAIT_S = 60.0  # how long a prompt waits for the version that it asks for, before it goes back: each time longer
UPDATE_RETRY_S = 1.0
DELIVERY_TOKENS = 32  # stored of an answer, they pay for one more delivery: what its workers die of stores fewer
PARTIALS_EVERY_S = 0.5
TWICE_RETRY_S = 0.5  # before a turn that the queue holds twice is looked at again: its answer has been stored by then


class Tokenizer(Protocol):
    """What the worker needs of a tokenizer; `ops.models` makes it from transformers."""

    def encode_prompt(self, prompt: Any) -> tuple[int, ...]:
        """Token ids of a text, or of chat messages by the model's template, ready for the answer."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""


class WeightsPort(Protocol):
    """How weights get here; `bus.weights.WeightReader` is it."""

    async def fetch(self, event: WeightVersion) -> Local:
        """Where the version lies here, after its bytes were checked. Raises `bus.weights.WeightsError`."""

    def close(self) -> None:
        """No more weights are wanted."""


class RolloutWorker:
    """Serves prompts with one engine, under the weights that `weights` gets; with `turns`, the turns of episodes."""

    def __init__(
        self,
        bus: Bus,
        config: RolloutConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        stop_token_ids: tuple[int, ...],
        weights: WeightsPort,
        name: str,
        early_stop: EarlyStop | None = None,
        turns: bool = False,
    ) -> None:
        self.bus = bus
        self.config = config
        self.engine = engine
        self._guard = Guard(engine, early_stop) if early_stop is not None else None
        self._ended = Ended(bus) if turns else None
        self._watch = TurnWatch(bus, engine, tokenizer.decode, name)
        self.weights = weights
        self.name = name
        self.decode = tokenizer.decode
        self.sampling = Sampling(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=stop_token_ids,
        )
        self._encode = _memoised(tokenizer.encode_prompt)
        self._updated = asyncio.Condition()
        self._making: dict[str, asyncio.Future[None]] = {}  # turns by their ids
        self._saved: dict[str, int] = {}  # running sample's id -> tokens in its newest stored partial
        self._finished = 0
        self._busy_s = 0.0
        self._swaps = 0
        self._without_version = 0  # prompts that wait for weights
        self._leaving = False
        self._fed_by = "turns" if turns else "prompts"
        self._refused = -1  # the newest version that could not be had
        self.gauges = Gauges(bus, name, "rollout", self._read_gauges)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`; then hand over what is unfinished and return."""
        await self.engine.start()
        # A few more than the engine decodes at once, so that a finished row is replaced in the same step.
        places = self.config.slots + max(1, self.config.slots // 8)
        async with self.gauges.beating():
            self.gauges.state = "working"
            helpers = [asyncio.create_task(self._follow_weights(), name=f"{self.name} follows weights")]
            if self._guard is not None:
                helpers.append(asyncio.create_task(self._guard.watch(), name=f"{self.name} gives hopeless ones up"))
            if self.config.partial_every:
                helpers.append(asyncio.create_task(self._save_partials(), name=f"{self.name} saves partials"))
            if self._ended is not None:
                helpers.append(asyncio.create_task(self._ended.follow(), name=f"{self.name} follows drops"))
                helpers.append(asyncio.create_task(self._watch.watch(), name=f"{self.name} watches turns"))
            consumer = TURN_WORKERS if self._ended is not None else ROLLOUT_WORKERS
            serving = asyncio.create_task(self._serve(consumer, places, stop))
            stopping = asyncio.create_task(stop.wait())
            failing = asyncio.create_task(self.engine.failed(), name=f"{self.name} watches its engine")
            try:
                await asyncio.wait([serving, stopping, failing, *helpers], return_when=asyncio.FIRST_COMPLETED)
                for helper in helpers:
                    if helper.done() and not failing.done():
                        helper.result()  # follows for ever, so it failed
                if not serving.done():
                    stop.set()
                    await self.engine.hand_over()
                    self._leaving = True
                    async with self._updated:
                        self._updated.notify_all()  # whoever waits for a version hands back too
                await serving
                if failing.done():  # what it had was handed over
                    failing.result()
            finally:
                for task in (serving, stopping, failing, *helpers):
                    task.cancel()
                await asyncio.gather(serving, stopping, failing, *helpers, return_exceptions=True)
                await self.engine.close()
                self.weights.close()

    async def _serve(self, consumer: Consumer, places: int, stop: asyncio.Event) -> None:
        """Whoever joins takes prompts once it has weights: until then, others can begin on them."""
        async with self._updated:
            await self._updated.wait_for(lambda: self._has_weights or stop.is_set())
        more = self._more_deliveries
        await serve(self.bus, consumer, self._handle, room=lambda: places, stop=stop, name=self.name, more=more)

    @property
    def _has_weights(self) -> bool:
        return self.engine.version >= 0

    async def _handle(self, message: Message, delivery: Delivery) -> Sequence[Message] | HandBack:
        assert isinstance(message, Prompt | Turn)
        if self._ended is None:
            return await self._generated(message, delivery)
        if (making := self._making.get(message.id)) is not None:  # an episode has asked again, and it was stored twice
            await asyncio.wait([making])
            raise Retry(delay_s=TWICE_RETRY_S)
        self._making[message.id] = making = asyncio.get_running_loop().create_future()
        try:
            if delivery.deliveries > 1 and await self.bus.last(ANSWERS, message.id) is not None:
                return []  # only the acknowledgement was lost
            return await self._ended.unless(message.sample_id, self._generated(message, delivery)) or []
        finally:
            del self._making[message.id]
            making.set_result(None)

    async def _generated(self, message: Prompt | Turn, delivery: Delivery) -> Sequence[Message] | HandBack:
        arrived = clock.monotonic_s()
        if not await self._has_version(message.min_version, VERSION_WAIT_S * delivery.deliveries):
            return HandBack()
        name = name_of(message)
        resumed = await self._partial(name) if delivery.deliveries > 1 else None
        try:
            if isinstance(message, Turn):
                prompt_tokens = tuple(message.prompt_tokens.tolist())
            else:
                prompt_tokens = self._encode(message.prompt)
            prefix = prefix_of(name, prompt_tokens, resumed) if resumed else None
            request = Request(name, prompt_tokens, sampling_of(message, self.sampling), message.seed, prefix)
            generating = self._guard.generate(request) if self._guard is not None else self._unguarded(request)
            if isinstance(message, Turn):
                generation, cut, saved = await self._watch.generate(message, generating)
            else:
                generation, cut, saved = await generating
        except (EngineError, ValueError) as error:
            if isinstance(error, EngineError) and not isinstance(error, ValueError):
                raise
            if isinstance(message, Turn):  # the episode decides what that means for it
                return [refusal_of(message, error, self.name)]
            raise Rejected(f"the prompt cannot be generated from: {error}", drop="bad_prompt") from error
        if generation.finish is None:
            return HandBack([partial_of(generation, self.name)] if generation.tokens else [])
        self._finished += 1
        text = text_of(message, self.decode(generation.tokens))
        handed_over = delivery.deliveries - 1 if resumed else 0
        seconds = clock.monotonic_s() - arrived
        return [result_of(message, Made(generation, text, self.name, seconds, handed_over, cut, saved))]

    async def _unguarded(self, request: Request) -> Outcome:
        return await self.engine.generate(request), None, 0

    async def _has_version(self, version: int, patience_s: float) -> bool:
        """Whether this version or a newer one is here, or has come before the worker leaves."""
        if self.engine.version >= version:
            return True
        self._without_version += 1
        try:
            async with self._updated, asyncio.timeout(patience_s):
                await self._updated.wait_for(lambda: self.engine.version >= version or self._leaving)
        except TimeoutError:
            raise Retry(delay_s=1.0) from None
        finally:
            self._without_version -= 1
        return self.engine.version >= version

    async def _more_deliveries(self, entry: Entry) -> int:
        """How many of its deliveries say nothing against a prompt or a turn.

        A long answer may be handed over many times, and comes further each time. And nobody dies of what waits for its
        version: it goes back, in case that others have it, as often as need be.
        """
        with contextlib.suppress(MalformedMessage):
            message = entry.message()
            if isinstance(message, Prompt | Turn) and message.min_version > self.engine.version:
                return sys.maxsize
        partial = await self._partial(entry.id)
        return 0 if partial is None else len(partial.tokens) // DELIVERY_TOKENS

    async def _partial(self, name: str) -> Partial | None:
        entry = await self.bus.last(PARTIALS, name)
        if entry is None:
            return None
        message = entry.message()
        return message if isinstance(message, Partial) else None

    async def _follow_weights(self) -> None:
        """Hold the newest version, always. What came while one was loaded is skipped but for the newest."""
        newest = await self.bus.last(WEIGHTS)
        start = newest.seq if newest else 1
        versions: asyncio.Queue[WeightVersion] = asyncio.Queue(1)
        reader = asyncio.create_task(self._read_weights(start, versions), name=f"{self.name} reads weights")
        wanted: WeightVersion | None = None  # what could not be had yet
        try:
            while True:
                get = asyncio.create_task(versions.get())
                try:
                    patience_s = UPDATE_RETRY_S if wanted is not None else None
                    await asyncio.wait([get, reader], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                    if reader.done():
                        reader.result()
                    if get.done():
                        wanted = get.result()
                finally:
                    get.cancel()
                if wanted is not None and await self._update(wanted):
                    wanted = None
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read_weights(self, start: int, versions: asyncio.Queue[WeightVersion]) -> None:
        async for entry in self.bus.read(WEIGHTS, start):
            message = entry.message()
            assert isinstance(message, WeightVersion)
            if versions.full():
                versions.get_nowait()
            versions.put_nowait(message)

    async def _update(self, event: WeightVersion) -> bool:
        """Take a version in; False if it cannot be had now, and the old one goes on."""
        if event.version <= self.engine.version:
            return True
        try:
            local = await self.weights.fetch(event)
            await self.engine.update(event.version, local.path, local.base)
        except (CannotBeHad, WeightsError) as error:
            # Collected while we were slow: a newer one is announced already. Or damaged: a trainer that starts again
            # writes its newest version anew.
            if event.version > self._refused:
                self._refused = event.version
                log.warning("weights_not_loaded", worker=self.name, version=event.version, reason=str(error))
            return False
        self._swaps += 1
        log.info("weights_loaded", worker=self.name, version=event.version)
        async with self._updated:
            self._updated.notify_all()
        return True

    async def _save_partials(self) -> None:
        """Publish the prefixes of running samples that grew by `partial_every` tokens, against kill -9."""
        while True:
            await asyncio.sleep(PARTIALS_EVERY_S)
            lengths = self.engine.lengths()  # of what is not running, however it ended, nothing is kept
            self._saved = {name: tokens for name, tokens in self._saved.items() if name in lengths}
            for name, length in lengths.items():
                if length - self._saved.get(name, 0) < self.config.partial_every:
                    continue
                if (generation := self.engine.snapshot(name)) is not None:
                    self._saved[name] = len(generation.tokens)
                    await self.bus.publish(partial_of(generation, self.name))

    def _read_gauges(self) -> dict[str, Any]:
        stats = self.engine.stats()
        busy, self._busy_s = stats.busy_s + stats.swapping_s - self._busy_s, stats.busy_s + stats.swapping_s
        return {
            "tokens_generated": stats.tokens_generated,
            "forward_passes": stats.forward_passes,
            "prefill_tokens": stats.prefill_tokens,
            "cached_tokens": stats.cached_tokens,
            "stopped_early": self._guard.stopped if self._guard is not None else 0,
            "saved_tokens": self._guard.saved_tokens if self._guard is not None else 0,
            "running": stats.running,
            "waiting": stats.waiting,
            "finished": self._finished,
            "version": self.engine.version,
            "swaps": self._swaps,
            "busy_s": round(stats.busy_s, 3),
            "swapping_s": round(stats.swapping_s, 3),
            "idle_share": round(max(0.0, 1.0 - busy / self.gauges.span_s), 3),
            "idle_s": round(max(0.0, self.gauges.alive_s - stats.busy_s - stats.swapping_s), 3),
            "idle_why": "" if stats.running else self._waits_for(),
        }

    def _waits_for(self) -> str:
        return "weights" if self._without_version or not self._has_weights else self._fed_by


def _memoised(encode: Callable[[Any], tuple[int, ...]]) -> Callable[[Any], tuple[int, ...]]:
    """The samples of a group share their prompt: encode it once."""

    @functools.lru_cache(maxsize=4096)
    def by_text(text: str) -> tuple[int, ...]:
        return encode(json.loads(text))

    return lambda prompt: by_text(json.dumps(prompt))
