"""What a rollout worker asks of whatever decodes for it, and the values that pass between the two. No torch here.

One sample's way through an engine, with an update and a hand-over on it:

    Request(sample_id="s", prompt_tokens=(5, 6), sampling=..., seed=7)
      -> three tokens under version 4, update(5), two tokens under version 5, hand_over()
      -> Generation("s", (5, 6), tokens=(9, 8, 7, 6, 5), logprobs=(...), segments=((4, 3), (5, 2)), finish=None)
    Request("s", (5, 6), ..., seed=7, prefix=<that generation>)     on another worker, which holds version 6
      -> Generation(..., segments=((4, 3), (5, 2), (6, 40)), finish="stop")
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Finish = Literal["stop", "length"]


class EngineError(Exception):
    """The base of what an engine raises on purpose."""


class ContextTooLongError(EngineError, ValueError):
    """A prompt leaves the model no room for one new token. Filter such prompts out, or use a longer context."""


class InvalidRequestError(EngineError, ValueError):
    """A request that no engine state can make valid: an empty prompt, an unknown token, a foreign prefix."""


class UnsupportedModelError(EngineError, ValueError):
    """The model's architecture cannot be decoded by this engine."""


class WeightsError(EngineError, ValueError):
    """The weights could not be read or do not fit the model. The old weights are untouched."""


class NonFiniteLogitsError(EngineError, ArithmeticError):
    """The model returned NaN or infinity: the policy has diverged, or its dtype overflows."""


class EngineDiedError(EngineError, RuntimeError):
    """The process that decodes has ended or answers no more. Its samples were handed over."""


class EngineClosedError(EngineError, RuntimeError):
    """The engine was not started, or has been closed."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: temperature first, then top-k, then top-p over what top-k left.

    `temperature=0.0` is greedy (ties go to the smaller id) and reports logprob 0.0: a certain choice.
    `top_k=0` and `top_p=1.0` switch the truncations off. A stop token ends the answer and belongs to it.
    Out of bounds raises `ValueError`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or positive, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, not {self.top_k}")


@dataclass(frozen=True, slots=True)
class Generation:
    """What became of a request.

    `logprobs[i]` is the log-probability (nats) of `tokens[i]` under the distribution that it was drawn from, that is
    after temperature and truncation. `segments` are runs `(version, count)` in order; counts sum to `len(tokens)`.
    `finish` is "stop", "length", or None for a sample that is unfinished: running still, or handed over.
    """

    sample_id: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[tuple[int, int], ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate. `seed` (any int, taken modulo 2**64) names its random stream.

    Token i is drawn with the i-th number of that stream, whatever its neighbours in the batch. With `prefix`, decoding
    goes on after the prefix's tokens, which are kept with their logprobs and segments; `sampling.max_new_tokens`
    counts them too.
    """

    sample_id: str
    prompt_tokens: tuple[int, ...]
    sampling: Sampling
    seed: int
    prefix: Generation | None = None

    def unfinished(self) -> Generation:
        """What a hand-over returns for a request that never ran: its prefix, or an empty generation."""
        return self.prefix or Generation(self.sample_id, self.prompt_tokens, (), (), (), None)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the engine. Counts and seconds (wall clock) are totals since it was made.

    `running` sequences are in the batch, of these `rebuilding` wait for their cache after an update, `waiting` ones
    have no slot yet. `busy_s` is time spent in prefill and decode, `swapping_s` time spent in loading weights and
    rebuilding caches; `rebuilding_s`, of that the caches, is 0 where the engine prefills as part of its decoding.
    Of the tokens that samples begin with, `prefill_tokens` went through the model, and `cached_tokens` were spared
    that by a cache that they share with others.
    """

    running: int
    waiting: int
    tokens_generated: int
    forward_passes: int
    busy_s: float
    swapping_s: float
    prefill_tokens: int = 0
    cached_tokens: int = 0
    rebuilding: int = 0
    rebuilding_s: float = 0.0


class Engine(Protocol):
    """Decodes many requests at once and takes new weights while it does. All methods belong to one asyncio loop.

    Any failure of the decoding itself is raised by every pending call and by all later ones.
    """

    @property
    def version(self) -> int:
        """Of the weights held now."""
        ...

    @property
    def slots(self) -> int:
        """Sequences that are decoded together; more requests than this wait."""
        ...

    async def start(self) -> None:
        """Begin to serve."""
        ...

    async def generate(self, request: Request) -> Generation:
        """Resolve when the sample is finished, or with `finish=None` when it is handed over.

        Cancelling the call frees its slot. Raises `ContextTooLongError` and `InvalidRequestError`.
        """
        ...

    async def update(self, version: int, path: str | Path, base: str | Path | None = None) -> None:
        """Hold the weights of `version` once this returns: full ones, in a safetensors file or a directory of them.

        With `base`, those are the full ones, and `path` is a file with a LoRA adapter over them (see `bus.adapter`).
        Raises `WeightsError` if they do not fit; the engine then goes on with the old ones.
        """
        ...

    def lengths(self) -> dict[str, int]:
        """How many tokens each running sequence has, by sample id. Callable from any thread, as are the next two."""
        ...

    def tokens(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Of each of these samples that is running, the tokens from a place on."""
        ...

    def snapshot(self, sample_id: str) -> Generation | None:
        """A running sequence as it is now, `finish=None`; None if it is not running (any more).

        All of it is copied, 30,000 tokens in a millisecond: ask for one after another, and let the loop run between.
        """
        ...

    async def failed(self) -> None:
        """Raise when the decoding fails for good, at once if it has; until then, wait.

        An engine whose decoding happens elsewhere may hand its samples over then, instead of raising from each call.
        """
        ...

    async def hand_over(self) -> None:
        """Resolve every unfinished `generate()` with `finish=None` and its tokens so far; later ones at once."""
        ...

    async def close(self) -> None:
        """Hand over what runs and release everything. Later calls raise `EngineClosedError`. May be repeated."""
        ...

    def stats(self) -> EngineStats:
        """A reading of the engine."""
        ...
