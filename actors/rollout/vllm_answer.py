"""A sample that vLLM is generating, as far as it is known on our side of the process boundary."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

from actors.rollout.engine import Finish, Generation, NonFiniteLogitsError, Request

Segments = tuple[tuple[int, int], ...]


def seed_of(request: Request) -> int:
    """The seed that vLLM gets, in [0, 2**63).

    vLLM's random streams begin at their first number, so a sample that is resumed from a prefix cannot go on with the
    stream that it began with: it gets another one, which follows from the request's seed and the prefix's length.
    """
    at = len(request.unfinished().tokens)
    text = f"{request.seed % 2**64}:{at}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def joined(*parts: Iterable[tuple[int, int]]) -> Segments:
    """Runs (version, count) one after another; neighbours of the same version become one, empty ones go."""
    runs: list[tuple[int, int]] = []
    for version, count in (run for part in parts for run in part):
        if count and runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        elif count:
            runs.append((version, count))
    return tuple(runs)


class Answer:
    """Tokens, logprobs and versions of one sample.

    The loop writes; any thread may read, by `length`, `tokens_from` and `generation(None)`.
    """

    def __init__(self, request: Request, version: int) -> None:
        self.request = request
        self.prefix = request.unfinished()
        self.began = False
        self.anew = False  # vLLM is to be asked again, since nothing of it was made
        self._greedy = request.sampling.temperature == 0.0
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._marks: list[tuple[int, int]] = [(version, 0)]  # (version, first new token), as seen from here
        self._spans: Segments | None = None  # as the engine has stamped them, once it is finished

    @property
    def length(self) -> int:
        """Tokens of the answer."""
        return len(self.prefix.tokens) + len(self._tokens)

    @property
    def known_tokens(self) -> int:
        """Of prompt and answer."""
        return len(self.request.prompt_tokens) + self.length

    def tokens_from(self, start: int) -> tuple[int, ...]:
        """Those of the answer from a place on."""
        return self.prefix.tokens[start:] + tuple(self._tokens[max(0, start - len(self.prefix.tokens)) :])

    def take(self, tokens: Sequence[int], logprobs: Sequence[Any]) -> None:
        """New tokens and, for each, vLLM's `{token: Logprob}`. Raises `NonFiniteLogitsError`."""
        values = [float(entry[token].logprob) for token, entry in zip(tokens, logprobs, strict=True)]
        if not all(map(math.isfinite, values)):
            raise NonFiniteLogitsError(
                f"sample {self.request.sample_id}: a sampled token has the logprob {min(values)}: the policy has "
                "diverged (lower the learning rate, or go back to an earlier version), or its dtype overflows"
            )
        self._logprobs += [0.0] * len(values) if self._greedy else values  # before the tokens: see `generation`
        self._tokens += tokens

    def updated(self, version: int) -> None:
        """Tokens that come from now on are of another version."""
        self._marks.append((version, len(self._tokens)))

    def stamped(self, spans: Iterable[Any] | None) -> None:
        """vLLM's spans (version, start, end) over the new tokens, which count more than what was seen from here."""
        if spans is not None:
            self._spans = tuple((int(span.version), span.end - span.start) for span in spans)

    def generation(self, finish: Finish | None) -> Generation:
        """What is known of it now."""
        tokens = tuple(self._tokens)
        return Generation(
            sample_id=self.request.sample_id,
            prompt_tokens=self.request.prompt_tokens,
            tokens=self.prefix.tokens + tokens,
            logprobs=self.prefix.logprobs + tuple(self._logprobs[: len(tokens)]),
            segments=joined(self.prefix.segments, self._seen(len(tokens)) if self._spans is None else self._spans),
            finish=finish,
        )

    def _seen(self, count: int) -> Segments:
        marks = list(self._marks)
        ends = [start for _, start in marks[1:]] + [count]
        return tuple(
            (version, max(0, min(end, count) - start)) for (version, start), end in zip(marks, ends, strict=True)
        )
