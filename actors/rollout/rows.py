"""The running sequences as arrays: tokens, logprobs, lengths and sampling parameters, one row a sequence.

Rows [0:count] are the running ones. Of these [0:ready] have their tokens but the newest in the KV cache and are
decoded; the others wait for a prefill. Numpy only, so that a decode step does no Python work per row; Python runs when
a row enters or leaves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.rollout.engine import Finish, Generation, Request
from actors.rollout.sampling import F64, I64, U64, stream_key

_STATE = np.dtype(
    [
        ("ticket", np.int64),
        ("length", np.int64),  # tokens known: prompt and answer
        ("prompt", np.int64),  # tokens of the prompt
        ("full", np.int64),  # the length at which the answer is cut
        ("key", np.uint64),  # of the row's random stream
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("stops", np.int64),  # row of the stop table
    ]
)


@dataclass(slots=True)
class _Sample:
    request: Request
    closed: list[tuple[int, int]] = field(default_factory=list)  # segments of versions that are no longer held
    closed_tokens: int = 0


class Moves(NamedTuple):
    """Which rows were overwritten, and with which."""

    to: I64
    source: I64


class Rows:
    """Up to `slots` running sequences. Not thread-safe."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self.count = 0
        self.ready = 0
        self._vocab_size = vocab_size
        self._state = np.zeros(slots, dtype=_STATE)
        self._ids: I64 = np.zeros((slots, 0), dtype=np.int64)
        self._logprobs: F64 = np.zeros((slots, 0), dtype=np.float64)
        self._samples: list[_Sample] = []
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self._stop_table: NDArray[np.bool_] = np.zeros((0, vocab_size), dtype=np.bool_)

    @property
    def lengths(self) -> I64:
        """Tokens known of each running sequence, [count]."""
        return self._state["length"][: self.count]

    @property
    def last_tokens(self) -> I64:
        """The newest token of each that is ready, [ready]."""
        newest: I64 = self._ids[np.arange(self.ready), self.lengths[: self.ready] - 1]
        return newest

    @property
    def answered(self) -> I64:
        """Tokens generated of each, [count]."""
        answered: I64 = self.lengths - self._state["prompt"][: self.count]
        return answered

    @property
    def keys(self) -> U64:
        """Of the random streams of those that are ready, [ready]."""
        return self._state["key"][: self.ready]

    @property
    def sampling(self) -> tuple[NDArray[np.float32], I64, F64]:
        """Temperature, top-k and top-p of each that is ready, [ready]."""
        state = self._state[: self.ready]
        return state["temperature"], state["top_k"], state["top_p"]

    def answer_lengths(self) -> dict[str, int]:
        """As `answered`, by sample id."""
        samples = zip(self._samples, self.answered.tolist(), strict=True)
        return {sample.request.sample_id: answered for sample, answered in samples}

    def answer_tokens(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Of each of these samples that is here, the tokens generated from a place on."""
        found: dict[str, tuple[int, ...]] = {}
        for row, sample in enumerate(self._samples):
            start = starts.get(sample.request.sample_id)
            if start is not None:
                begin = int(self._state["prompt"][row]) + start
                found[sample.request.sample_id] = tuple(self._ids[row, begin : self._state["length"][row]].tolist())
        return found

    def tokens_of(self, row: int) -> I64:
        """Prompt and answer so far of one row (a view)."""
        return self._ids[row, : self._state["length"][row]]

    def enter(self, ticket: int, request: Request, full: int) -> None:
        """Append a sequence that ends at `full` tokens at the latest, not ready yet.

        The caller keeps `count` within the slots.
        """
        row, prompt, prefix, sampling = self.count, request.prompt_tokens, request.unfinished(), request.sampling
        length = len(prompt) + len(prefix.tokens)
        self._widen(full)
        self._ids[row, :length] = prompt + prefix.tokens
        self._logprobs[row, len(prompt) : length] = prefix.logprobs
        self._state[row] = (
            *(ticket, length, len(prompt), full, stream_key(request.seed)),
            *(sampling.temperature, sampling.top_k, sampling.top_p, self._stop_set(sampling.stop_token_ids)),
        )
        self._samples.append(_Sample(request, list(prefix.segments), len(prefix.tokens)))
        self.count += 1

    def append(self, tokens_N: I64, logprobs_N: F64) -> NDArray[np.bool_]:
        """Add one token to every ready sequence; returns which of them are finished by it, bool [ready]."""
        state, index = self._state[: self.ready], np.arange(self.ready)
        self._ids[index, state["length"]] = tokens_N
        self._logprobs[index, state["length"]] = logprobs_N
        state["length"] += 1
        finished: NDArray[np.bool_] = self._stop_table[state["stops"], tokens_N] | (state["length"] >= state["full"])
        return finished

    def close_segments(self, version: int) -> None:
        """Tokens up to here keep `version`; those to come belong to another."""
        for sample, answered in zip(self._samples, self.answered.tolist(), strict=True):
            sample.closed = _extended(sample.closed, version, answered - sample.closed_tokens)
            sample.closed_tokens = answered

    def generation(self, row: int, version: int, finished: bool) -> Generation:
        """What a row holds now, its newest tokens being of `version`."""
        state, sample = self._state[row], self._samples[row]
        prompt, length = int(state["prompt"]), int(state["length"])
        tokens = tuple(self._ids[row, prompt:length].tolist())
        finish: Finish | None = None
        if finished:
            finish = "stop" if self._stop_table[state["stops"], tokens[-1]] else "length"
        return Generation(
            sample_id=sample.request.sample_id,
            prompt_tokens=sample.request.prompt_tokens,
            tokens=tokens,
            logprobs=tuple(self._logprobs[row, prompt:length].tolist()),
            segments=tuple(_extended(sample.closed, version, len(tokens) - sample.closed_tokens)),
            finish=finish,
        )

    def ticket(self, row: int) -> int:
        """The number that the row entered with."""
        return int(self._state["ticket"][row])

    def find(self, ticket: int) -> int | None:
        """The row that holds a ticket now."""
        rows = np.flatnonzero(self._state["ticket"][: self.count] == ticket)
        return int(rows[0]) if len(rows) else None

    def find_sample(self, sample_id: str) -> int | None:
        """The row that holds a sample now; the newer one if it was given twice."""
        rows = (row for row in reversed(range(self.count)) if self._samples[row].request.sample_id == sample_id)
        return next(rows, None)

    def leave(self, leaving_N: NDArray[np.bool_]) -> Moves:
        """Take rows out, bool [count]; the last ready ones fill the gaps of the ready, the waiting ones move up."""
        ready, staying = (int(np.count_nonzero(~leaving_N[:part])) for part in (self.ready, self.count))
        to = np.flatnonzero(leaving_N[:ready])
        source = ready + np.flatnonzero(~leaving_N[ready : self.ready])
        waiting = self.ready + np.flatnonzero(~leaving_N[self.ready :])  # whose order stays: they are sorted
        waiting_to = np.arange(ready, staying)
        all_to, all_source = np.concatenate([to, waiting_to]), np.concatenate([source, waiting])
        for column in (self._state, self._ids, self._logprobs):
            column[all_to] = column[all_source]
        for gap, row in zip(all_to.tolist(), all_source.tolist(), strict=True):
            self._samples[gap] = self._samples[row]
        del self._samples[staying:]
        self.count, self.ready = staying, ready
        return Moves(all_to, all_source)

    def sort(self, first: int) -> None:
        """Order rows [first:count] by length, equal sequences side by side. Their caches, if any, become wrong."""
        lengths = self.lengths.tolist()
        order = sorted(range(first, self.count), key=lambda row: (lengths[row], self.tokens_of(row).tobytes()))
        for column in (self._state, self._ids, self._logprobs):
            column[first : self.count] = column[order]
        self._samples[first:] = [self._samples[row] for row in order]

    def _stop_set(self, stop_token_ids: tuple[int, ...]) -> int:
        if stop_token_ids not in self._stop_sets:
            stops = np.zeros((1, self._vocab_size), dtype=np.bool_)
            stops[0, [token for token in stop_token_ids if 0 <= token < self._vocab_size]] = True
            self._stop_table = np.concatenate([self._stop_table, stops])
            self._stop_sets[stop_token_ids] = len(self._stop_sets)
        return self._stop_sets[stop_token_ids]

    def _widen(self, width: int) -> None:
        missing = width - self._ids.shape[1]
        if missing > 0:
            self._ids = np.pad(self._ids, ((0, 0), (0, missing)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, missing)))


def _extended(segments: list[tuple[int, int]], version: int, count: int) -> list[tuple[int, int]]:
    """Segments followed by `count` tokens of `version`, joined to the last run where that is of the same version."""
    if count == 0:
        return segments
    if segments and segments[-1][0] == version:
        return [*segments[:-1], (version, segments[-1][1] + count)]
    return [*segments, (version, count)]
