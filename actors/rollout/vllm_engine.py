"""vLLM behind the `Engine` protocol: token ids in, token ids and their logprobs out, new weights between two tokens.

    rollout worker                      vLLM's core, a process of its own        vLLM's workers, one a device
    generate() ── token ids, seed ──▶   batches, samples             ◀────────▶  the model
    one answer ◀── each new token ──
    update()   ── pause, keep ──────▶   stops between two steps; the KV cache is cleared, or kept
               ── load(path) ────────────────────────────────────────────────▶   overwrites the weights
               ── version, resume ──▶   stamps what follows; cleared samples are prefilled again

The core stamps each token with the version that it holds, so tokens are told apart by who made them and not by when
they arrived. The prefix cache is keyed by the version as well: a prompt never meets a cache of older weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from actors.rollout import vllm_versions
from actors.rollout.admission import settled
from actors.rollout.config import RolloutConfig
from actors.rollout.engine import (
    EngineClosedError,
    EngineDiedError,
    EngineError,
    EngineStats,
    Finish,
    Generation,
    InvalidRequestError,
    Request,
    WeightsError,
)
from actors.rollout.vllm_answer import Answer, seed_of
from actors.rollout.weight_shapes import check_shapes, weight_shapes

log = structlog.get_logger()

DEAD_CORE = "vLLM's core has died; its last words are in the worker's .out file"
LOOK_S = 0.5  # between two looks at the core's health
PAUSE_S = 120.0  # for the step in hand to end, a long prefill on a slow machine; and for going on
LOAD_S = 600.0
CLOSE_S = 10.0
ABORT_S = 10.0


class VllmEngine:
    """`engine.Engine` over vLLM's `AsyncLLM`, for the model folder `model`, whose weights count as `version`.

    All methods belong to the loop that awaited `start`, but for `lengths`, `tokens` and `snapshot`. A sample resumed
    from a prefix goes on with another random stream, see `vllm_answer.seed_of`; within one `generate` a stream survives
    updates.

    When vLLM's core dies, every pending `generate` resolves as at a hand-over, and `failed` raises `EngineDiedError`.
    """

    def __init__(
        self,
        model: Path,
        config: RolloutConfig,
        version: int = 0,
        start: Callable[[Path, RolloutConfig], Any] = vllm_versions.start,
    ) -> None:
        self.config = config
        self._model = model
        self._version = version
        self._start = start
        self._llm: Any = None
        self._shapes = weight_shapes(model)
        self._vocab_size = 0
        self._max_context = 0
        self._answers: dict[str, Answer] = {}  # those that vLLM has, by its request id
        self._requests = 0
        self._pending = 0
        # More than the slots wait in vLLM, where they fill a free one without delay; but not if updates drain those.
        self._room = asyncio.Semaphore(config.slots) if config.on_update == "drain" else contextlib.nullcontext()
        self._admitting = asyncio.Event()  # not while an update drains, or swaps
        self._admitting.set()
        self._idle = asyncio.Event()  # vLLM has nothing
        self._idle.set()
        self._updating = asyncio.Lock()
        self._swapping = False
        self._handed_over = False
        self._closed = False
        self._error: EngineError | None = None
        self._broken = asyncio.Event()  # _error is set
        self._watching: asyncio.Task[None] | None = None
        self._heard_s = 0.0  # when the last token came, or the last time there was nothing to wait for
        self._busy_since_s: float | None = None
        self._busy_s = 0.0
        self._swapping_s = 0.0
        self._tokens = 0
        self._passes = 0
        self._in_pass: set[str] = set()
        self._prefilled = 0
        self._cached = 0

    @property
    def version(self) -> int:
        """See `Engine`."""
        return self._version

    @property
    def slots(self) -> int:
        """See `Engine`."""
        return self.config.slots

    async def start(self) -> None:
        """Start vLLM's processes and load the model: seconds to minutes. Raises `UserError`. Once."""
        self._llm = await asyncio.to_thread(self._start, self._model, self.config)
        self._vocab_size = int(self._llm.model_config.get_vocab_size())
        self._max_context = int(self._llm.model_config.max_model_len)
        await self._llm.update_weight_version(str(self._version))
        self._heard_s = time.monotonic()
        self._watching = asyncio.create_task(self._watch(), name="watches vLLM")

    async def failed(self) -> None:
        """Raise when the engine has failed; until then, wait."""
        await self._broken.wait()
        assert self._error is not None
        raise self._error

    async def generate(self, request: Request) -> Generation:
        """See `Engine`."""
        self._check_open()
        complete = settled(request, self._vocab_size, self._max_context)
        if complete is not None:
            return complete
        self._pending += 1
        try:
            async with self._room:
                await self._admitting.wait()
                if self._handed_over:
                    return request.unfinished()
                return await self._generate(request)
        finally:
            self._pending -= 1

    async def _generate(self, request: Request) -> Generation:
        while True:
            answer = Answer(request, self._version)
            finish = await self._generate_once(answer)
            if not answer.anew:
                return answer.generation(finish)
            await self._admitting.wait()
            if self._handed_over:
                return request.unfinished()

    async def _generate_once(self, answer: Answer) -> Finish | None:
        self._requests += 1
        name = f"{answer.request.sample_id}#{self._requests}"
        self._answers[name] = answer
        self._busy()
        try:
            return await self._follow(name, answer)
        except EngineError as error:
            if not isinstance(error, ValueError):
                self._fail(error)
            raise
        finally:
            del self._answers[name]
            self._in_pass.discard(name)
            if not self._answers:
                self._pause_clock()
                self._idle.set()

    async def _follow(self, name: str, answer: Answer) -> Finish | None:
        """Take what vLLM makes of a request until it ends; None if it was handed over."""
        async for output in self._outputs(name, answer):
            made = output.outputs[0]
            self._heard_s = time.monotonic()
            if not answer.began:
                answer.began = True
                cached = int(output.num_cached_tokens or 0)
                self._cached += cached
                self._prefilled += len(output.prompt_token_ids) - cached
            if made.token_ids:
                self._count(name, len(made.token_ids))
                if not answer.anew:
                    answer.take(made.token_ids, made.logprobs)
            if output.finished:
                answer.stamped(vllm_versions.stamps(made))
                if made.finish_reason in ("stop", "length"):
                    finish: Finish = made.finish_reason
                    return finish
                if made.finish_reason != "abort":
                    raise EngineError(f"sample {answer.request.sample_id}: vLLM ended it with {made.finish_reason}")
            elif self._handed_over or answer.anew:  # it was on its way to the core when the others were told to end
                await self._llm.abort(name)
        return None

    async def _outputs(self, name: str, answer: Answer) -> AsyncIterator[Any]:
        """vLLM's outputs, its errors made ours. Ends early if its core died."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        prefix = answer.prefix
        prompt = {
            "prompt_token_ids": [*prefix.prompt_tokens, *prefix.tokens],
            "cache_salt": f"version {self._version}",
        }
        try:
            async for output in self._llm.generate(prompt, self._sampling(answer.request), name):
                yield output
        except EngineDeadError:
            self._fail(EngineDiedError(DEAD_CORE))
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequestError(f"sample {answer.request.sample_id}: {error}") from error

    def _sampling(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        return SamplingParams(
            max_tokens=sampling.max_new_tokens - len(request.unfinished().tokens),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed_of(request),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    async def update(self, version: int, path: str | Path, base: str | Path | None = None) -> None:
        """See `Engine`. Updates are carried out one after another, in the order of the calls.

        What cannot be read or does not fit is refused before anything is changed. Should a load fail in its midst, the
        engine fails as a whole: nobody could tell which weights it holds.
        """
        self._check_open()
        async with self._updating:
            self._check_open()
            check_shapes(self._shapes, await asyncio.to_thread(weight_shapes, Path(base or path)))
            await self._drain()
            self._admitting.clear()  # who comes now would name the old version to the prefix cache
            self._swapping = True
            started_s = time.monotonic()
            self._pause_clock()
            try:
                await self._swap(version, str(path), None if base is None else str(base))
            finally:
                self._swapping = False
                self._swapping_s += time.monotonic() - started_s
                self._heard_s = time.monotonic()
                self._admitting.set()
                if self._answers:
                    self._busy()

    async def _drain(self) -> None:
        """With on_update "drain", let nobody in and wait until all have finished."""
        if self.config.on_update != "drain":
            return
        self._admitting.clear()
        idle, broken = asyncio.create_task(self._idle.wait()), asyncio.create_task(self._broken.wait())
        try:
            await asyncio.wait([idle, broken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
            broken.cancel()
            if not self._idle.is_set():
                self._admitting.set()
        self._check_open()

    async def _swap(self, version: int, path: str, base: str | None) -> None:
        """Stop between two steps, load, name the version, go on. Raises `WeightsError` if nothing was changed."""
        try:
            async with asyncio.timeout(PAUSE_S):
                await self._llm.pause_generation(mode="keep", clear_cache=self.config.on_update != "keep")
            async with asyncio.timeout(LOAD_S):
                outcomes = await self._llm.collective_rpc("rollstream_load", args=(path, base))
            refused = [outcome["refused"] for outcome in outcomes if "refused" in outcome]
            broken = [outcome["broken"] for outcome in outcomes if "broken" in outcome]
            if broken or 0 < len(refused) < len(outcomes):
                raise EngineDiedError(f"loading version {version} failed in its midst: {(broken or refused)[0]}")
            async with asyncio.timeout(PAUSE_S):
                if not refused:
                    await self._named(version)
                    log.debug("weights_probed", version=version, tensors=[outcome["probed"] for outcome in outcomes])
                await self._llm.resume_generation()
        except Exception as error:
            died = error if isinstance(error, EngineDiedError) else EngineDiedError(f"vLLM took no weights: {error!r}")
            self._fail(died)
            raise died from error
        if refused:
            raise WeightsError(refused[0])

    async def _named(self, version: int) -> None:
        """The weights that were loaded count as a version from now on, here and in the core."""
        await self._llm.update_weight_version(str(version))
        self._version = version
        await vllm_versions.outputs_arrived(self._llm, self.config.slots)
        for answer in self._answers.values():
            answer.updated(version)
        await self._begin_anew()

    async def _begin_anew(self) -> None:
        """Have those that wait in vLLM ask again, under the version held now.

        With a cache that is kept they would begin on keys and values of weights that are gone. Who has a token already
        goes on: that is what keeping means.
        """
        if self.config.on_update == "keep":
            waiting = {name: answer for name, answer in self._answers.items() if not answer.began}
            for answer in waiting.values():
                answer.anew = True
            await self._llm.abort(list(waiting))

    def lengths(self) -> dict[str, int]:
        """See `Engine`."""
        return {answer.request.sample_id: answer.length for answer in list(self._answers.values())}

    def tokens(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """See `Engine`."""
        named = ((answer.request.sample_id, answer) for answer in list(self._answers.values()))
        return {name: answer.tokens_from(starts[name]) for name, answer in named if name in starts}

    def snapshot(self, sample_id: str) -> Generation | None:
        """See `Engine`."""
        for answer in reversed(list(self._answers.values())):
            if answer.request.sample_id == sample_id:
                return answer.generation(None)
        return None

    async def hand_over(self) -> None:
        """See `Engine`."""
        self._check_open()
        await self._release()

    async def _release(self) -> None:
        self._handed_over = True
        self._admitting.set()
        await self._abort()

    async def _abort(self) -> None:
        """End all that vLLM has; what it made so far is on our side already, so a dead core hands over as well."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ABORT_S):
                await self._llm.abort(list(self._answers))
                await self._idle.wait()

    async def close(self) -> None:
        """See `Engine`. Returns when vLLM's processes have ended."""
        if self._closed or self._llm is None:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._release()
        await asyncio.to_thread(self._llm.shutdown, CLOSE_S)

    def stats(self) -> EngineStats:
        """See `Engine`. A pass is counted whenever a sample gets its next token; prefills are not told apart."""
        running = sum(answer.began for answer in self._answers.values())
        since_s = 0.0 if self._busy_since_s is None else time.monotonic() - self._busy_since_s
        return EngineStats(
            running=running,
            waiting=self._pending - running,
            tokens_generated=self._tokens,
            forward_passes=self._passes,
            busy_s=self._busy_s + since_s,
            swapping_s=self._swapping_s,
            prefill_tokens=self._prefilled,
            cached_tokens=self._cached,
        )

    def _check_open(self) -> None:
        if self._closed or self._llm is None:
            raise EngineClosedError("the engine was not started, or has been closed")
        if self._error is not None and not isinstance(self._error, EngineDiedError):
            raise self._error

    def _fail(self, error: EngineError) -> None:
        """The first error counts. Whoever waits is handed over, and so is whoever comes."""
        if self._error is not None:
            return
        self._error = error
        self._handed_over = True
        self._admitting.set()
        self._broken.set()
        log.error("engine_failed", error=repr(error))

    async def _watch(self) -> None:
        """Notice a core that has died, or that makes no token for too long."""
        while self._error is None:
            await asyncio.sleep(LOOK_S)
            try:
                await self._llm.check_health()
            except Exception:
                self._fail(EngineDiedError(DEAD_CORE))
            if not self._answers or self._swapping:  # which has bounds of its own
                self._heard_s = time.monotonic()
            elif (silent_s := time.monotonic() - self._heard_s) > self.config.vllm.stalled_after_s:
                self._fail(EngineDiedError(f"vLLM has made no token for {silent_s:.0f} s"))
        await self._abort()  # who waits for a core that does not even die

    def _busy(self) -> None:
        self._idle.clear()
        if self._busy_since_s is None:
            self._busy_since_s = time.monotonic()

    def _pause_clock(self) -> None:
        if self._busy_since_s is not None:
            self._busy_s += time.monotonic() - self._busy_since_s
            self._busy_since_s = None

    def _count(self, name: str, tokens: int) -> None:
        self._tokens += tokens
        if name in self._in_pass:
            self._passes += 1
            self._in_pass.clear()
        self._in_pass.add(name)
