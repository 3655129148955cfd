"""The built-in decoder: continuous batching over any causal language model of transformers that attends to all it saw.

What one call does:

    add(requests)   rows at the end of the batch; their tokens but the last go through padded prefill forwards
    step()          one token for every row: the row's newest token goes in, the next one is drawn; done rows leave
    load(version)   new weights between two steps; every row's tokens but the last are to be prefilled again (recompute)

A row that is decoded is thus always "all tokens but the newest are cached": after a prompt, after a decode step, after
an update and after a resumption alike, so that tokens are drawn in one place only. The decoder holds the weights, and
therefore it stamps the version on each token.

After an update the cache is rebuilt share by share, the shortest rows first, and between two shares a step decodes
those that are done. Prefilling all that runs takes as long as the answers are, many times what the weights take; in
this way the worker is silent only until its shortest rows are there again.

Batch invariance (`config.deterministic`). A sum of floating-point numbers depends on its order, and the order in which
a matrix product or an attention sums depends on the shapes of its operands: the same row gets other last bits in
another batch. So shapes are made to follow from the config and the row itself. Every decode forward has `slots` rows,
empty ones among them; every prefill forward holds prompts of one rounded length only, and has a fixed number of rows
for that length. What is left is the number of positions that a decode step attends to, which is that of the longest
row: it is rounded up to whole vectors, so that the positions beyond a row's own add zeros to a sum of unchanged order.
The bits are the same for the same weights, slots and kind of machine, one thread, and samples that were never
interrupted: a cache that is rebuilt comes from prefill where the first one came from decoding.
"""

import inspect
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from actors.rollout.admission import settled
from actors.rollout.config import RolloutConfig
from actors.rollout.engine import Generation, Request, UnsupportedModelError
from actors.rollout.kv_cache import ATTENTION, SlotCache
from actors.rollout.load_weights import ReadWeights, WeightLoader
from actors.rollout.prompt_cache import PromptCache
from actors.rollout.rows import Rows
from actors.rollout.sampling import I64, sample, uniforms

# Of deterministic decoding: what lengths are rounded up to, and the rows of a prefill forward.
PADDED_TOKENS = 64
PADDED_PROMPTS = 8
# A share of a cache that is rebuilt takes about as long as so many steps of decoding, and so many seconds in any case.
# With more, the gaps between tokens are longer. With fewer, the rebuilding is, as its steps decode a part of the rows
# only: that costs little where a step's time follows from its rows, and much where it does not, as with small models.
REBUILD_STEPS = 2
REBUILD_S = 0.1
PART_TOKENS = 128  # of a sequence that is prefilled in parts, at least: fewer take nearly as long


class Decoder:
    """Decodes up to `config.slots` sequences together. One thread calls it; `snapshot` may be called from any.

    The model is taken over: switched to evaluation, to its slot attention where it uses SDPA, and to new weights in
    place by `load`. It stays on its device and keeps its dtype.

    A sequence ends at `max_context` tokens at the latest, with finish "length", however large `max_new_tokens` is: that
    is the model's `max_position_embeddings`, or its sliding window where that is shorter (within it, a window attends
    to everything, which is all that the slot cache can do).

    Raises `UnsupportedModelError` for recurrent and convolutional layers, and for models without explicit positions.
    """

    def __init__(self, model: PreTrainedModel, config: RolloutConfig, version: int = 0) -> None:
        self.max_context = _max_context(model)
        self.slots = config.slots
        self.version = version
        self.tokens_generated = 0
        self.forward_passes = 0
        self.busy_s = 0.0
        self.swapping_s = 0.0
        self.rebuilding_s = 0.0  # of that
        self._step_s = 0.0  # of the newest step, and
        self._prefilled_per_s = 0.0  # tokens of the newest prefill: what the size of a share follows
        self._begun = (-1, 0)  # the ticket of the row that is prefilled in part, and its tokens that are
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(ATTENTION)
        self._model: Any = model.train(False)  # its classes are typed only in part
        self.config = config
        self._vocab_size = model.get_input_embeddings().get_parameter("weight").shape[0]
        self._weights = WeightLoader(model)
        self._cache = SlotCache(config.slots)
        self._prompts = PromptCache(config.prompt_cache_mib << 20)
        self.prefill_tokens = 0  # of the tokens that samples began with: computed, and
        self.cached_tokens = 0  # taken from an equal one
        self._rows = Rows(config.slots, self._vocab_size)
        self._tickets = 0
        self._lock = threading.Lock()  # around changes of rows, never around a forward

    @classmethod
    def from_pretrained(cls, path: str | Path, config: RolloutConfig, version: int = 0) -> Self:
        """A decoder for the model saved in a directory, in the config's dtype.

        Sets the number of torch threads of this process, and silences the loader's progress bar.
        """
        torch.set_num_threads(config.threads)
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.dtype))
        for (
            parameter
        ) in model.parameters():  # pages of the file as yet: the first update would wait while each is copied
            parameter.data = parameter.data.clone()
        return cls(model, config, version)

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return self._rows.count

    @property
    def rebuilding(self) -> int:
        """Of these, the ones whose cache is not rebuilt yet after an update."""
        return self._rows.count - self._rows.ready

    def check(self, request: Request) -> Generation | None:
        """`admission.settled` for this model. From any thread."""
        return settled(request, self._vocab_size, self.max_context)

    @torch.inference_mode()
    def add(self, requests: Sequence[Request]) -> list[int]:
        """Take requests into the batch and prefill them; returns a ticket for each. At most `slots - running`.

        Rows that are `rebuilding` are done first: add when there are none, lest all others wait for them.
        """
        started = time.perf_counter()
        if len(requests) > self.slots - self.running:
            raise ValueError(f"{len(requests)} requests for {self.slots - self.running} free slots")
        if any(self.check(request) is not None for request in requests):
            raise ValueError("a request is finished already: ask check() before add()")
        self._prefill()
        first = self.running
        tickets = list(range(self._tickets, self._tickets + len(requests)))
        self._tickets += len(requests)
        with self._lock:
            for ticket, request in zip(tickets, requests, strict=True):
                full = len(request.prompt_tokens) + request.sampling.max_new_tokens
                self._rows.enter(ticket, request, min(full, self.max_context))
        self._begin(first)
        self.busy_s += time.perf_counter() - started
        return tickets

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Generation]]:
        """Draw one token for every sequence that is not `rebuilding`. Returns those that it finished, by ticket; their
        rows are free at once.

        Raises `NonFiniteLogitsError`.
        """
        rows = self._rows
        if rows.count == 0:
            return []
        self._rebuild()
        if rows.ready == 0:
            return []
        started = time.perf_counter()
        lengths_N = rows.lengths[: rows.ready]
        length, empty = int(lengths_N.max()), 0
        if self.config.deterministic:
            length, empty = _rounded(length), self.slots - rows.ready
        positions_N = torch.from_numpy(_extended(lengths_N - 1, empty)).to(self._model.device)
        visible_NL = torch.arange(length, device=positions_N.device) <= positions_N[:, None]
        self._cache.for_decode(positions_N, length)
        tokens_N1 = torch.from_numpy(_extended(rows.last_tokens, empty)).to(positions_N.device)[:, None]
        logits_NV = self._forward(tokens_N1, positions_N[:, None], self._additive(visible_NL)[:, None, None])
        logits_NV = logits_NV[: rows.ready]
        uniforms_N = uniforms(rows.keys, rows.answered[: rows.ready])
        tokens_N, logprobs_N = sample(logits_NV, uniforms_N, *rows.sampling)
        with self._lock:
            finished_N = rows.append(tokens_N, logprobs_N)
            results = [
                (rows.ticket(row), rows.generation(row, self.version, finished=True))
                for row in np.flatnonzero(finished_N).tolist()
            ]
            self._leave(np.concatenate([finished_N, np.zeros(self.rebuilding, dtype=np.bool_)]))
        self.tokens_generated += len(tokens_N)
        self._step_s = time.perf_counter() - started
        self.busy_s += self._step_s
        return results

    @torch.inference_mode()
    def remove(self, ticket: int) -> Generation | None:
        """Take a running sequence out, unfinished; None if it is not (any more) running."""
        with self._lock:
            row = self._rows.find(ticket)
            if row is None:
                return None
            generation = self._rows.generation(row, self.version, finished=False)
            self._leave(np.arange(self._rows.count) == row)
            return generation

    def clear(self) -> list[tuple[int, Generation]]:
        """Take all running sequences out, unfinished, by ticket."""
        with self._lock:
            everything = [
                (self._rows.ticket(row), self._rows.generation(row, self.version, finished=False))
                for row in range(self._rows.count)
            ]
            self._leave(np.ones(self._rows.count, dtype=np.bool_))
        return everything

    def lengths(self) -> dict[str, int]:
        """See `Engine`. From any thread, as are the next two; none of them waits for a forward pass."""
        with self._lock:
            return self._rows.answer_lengths()

    def tokens(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """See `Engine`."""
        with self._lock:
            return self._rows.answer_tokens(starts)

    def snapshot(self, sample_id: str) -> Generation | None:
        """See `Engine`."""
        with self._lock:
            row = self._rows.find_sample(sample_id)
            return None if row is None else self._rows.generation(row, self.version, finished=False)

    def load(self, version: int, path: str | Path, base: str | Path | None = None) -> None:
        """Hold the weights at `path` as `version`: `take` what was `read`."""
        self.take(version, self.read(path, base))

    def read(self, path: str | Path, base: str | Path | None = None) -> ReadWeights:
        """The weights at `path`; with `base` the weights there, with the LoRA adapter at `path` to be merged into them.

        From any thread, while others decode. Raises `WeightsError` if they do not fit.
        """
        return self._weights.read(path, base)

    @torch.inference_mode()
    def take(self, version: int, weights: ReadWeights) -> None:
        """Hold what was read as `version`. Running sequences go on under it, as `config.on_update` says.

        Tokens drawn so far keep their version and logprobs. With "drain" there must be none running: the caller steps
        until then.
        """
        if self.config.on_update == "drain" and self.running:
            raise ValueError(f"{self.running} sequences are running: drain means to finish them before the update")
        started = time.perf_counter()
        self._weights.write(weights)
        self._prompts.clear()  # also with "keep", which lets running sequences go on, and no new one begin, on old ones
        with self._lock:
            self._rows.close_segments(self.version)
            self.version = version
            if self.config.on_update == "recompute":
                self._rows.ready = 0
                self._rows.sort(0)
                self._begun = (-1, 0)
        self.swapping_s += time.perf_counter() - started

    def _leave(self, leaving_N: NDArray[np.bool_]) -> None:
        if leaving_N.any():
            moves = self._rows.leave(leaving_N)
            if len(moves.to):
                self._cache.move(moves.to, moves.source, int(self._rows.lengths.max()))

    def _begin(self, first: int) -> None:
        """Prefill new rows [first:count], and keep what their prompts came to for others of their groups."""
        begun = int((self._rows.lengths[first:] - 1).sum())
        with self._lock:
            self._rows.sort(first)
        computed = self._prefill()
        self.prefill_tokens += computed
        self.cached_tokens += begun - computed
        if self._prompts.bytes_max:
            for row in range(first, self._rows.count):
                if self._rows.answered[row] == 0 and self._rows.lengths[row] > 1:
                    tokens = self._rows.tokens_of(row)[:-1]
                    if self._prompts.get(tokens.tobytes()) is None:
                        self._prompts.put(tokens.tobytes(), self._cache.read(row, len(tokens)))

    def _rebuild(self) -> None:
        """The next share of the rows whose cache an update made void."""
        if not self.rebuilding:
            return
        started = time.perf_counter()
        self._prefill(int(max(REBUILD_STEPS * self._step_s, REBUILD_S) * self._prefilled_per_s))
        took_s = time.perf_counter() - started
        self.rebuilding_s += took_s
        self.swapping_s += took_s

    def _prefill(self, tokens: int = sys.maxsize) -> int:
        """Make rows ready that are not, in order, as far as so many tokens go. They are sorted.

        Returns how many tokens were computed.
        """
        rows, computed = self._rows, 0
        started = time.perf_counter()
        while rows.ready < rows.count:
            computed += self._prefill_next(min(tokens - computed, self.config.prefill_tokens))
            if computed >= tokens:
                break
        if computed:
            self._prefilled_per_s = computed / (time.perf_counter() - started)
        return computed

    def _prefill_next(self, tokens: int) -> int:
        """Cache all tokens but the newest of the next rows of like lengths, in one padded forward of at most `tokens`;
        or a part of one row, if it has more.

        Equal sequences (a group's samples share their prompt) are computed once and stored for each; those that were
        computed before are copied. Returns how many tokens were computed.
        """
        rows = self._rows
        sequence = rows.tokens_of(rows.ready)[:-1]
        if known := self._prompts.get(sequence.tobytes()):
            self._cache.write(slice(rows.ready, rows.ready + 1), known)
            rows.ready += 1
            return 0
        ticket, begun = self._begun
        begun = begun if ticket == rows.ticket(rows.ready) else 0
        part = min(len(sequence) - begun, max(tokens, PART_TOKENS), self.config.prefill_tokens)
        if not self.config.deterministic and part < len(sequence):
            self._prefill_part(sequence[: begun + part], begun)
            return part
        sequences: list[I64] = []
        sources: list[int] = []
        for row in range(rows.ready, rows.count):
            sequence = rows.tokens_of(row)[:-1]
            new = not sequences or not np.array_equal(sequence, sequences[-1])
            known = self._prompts.get(sequence.tobytes()) if new and sequences else None
            if new and sequences and (known or not self._fits(sequences, len(sequence), tokens)):
                break
            if new:
                sequences.append(sequence)
            sources.append(len(sequences) - 1)
        self._prefill_forward(sequences, np.array(sources, dtype=np.int64))
        rows.ready += len(sources)
        return sum(map(len, sequences))

    def _prefill_part(self, sequence: I64, begun: int) -> None:
        """Cache the tokens of the next row from `begun` to the end of `sequence`; with the last of them it is ready,
        and so are the rows behind it that are equal."""
        rows = self._rows
        self._prefill_forward([sequence[begun:]], np.zeros(1, dtype=np.int64), begun)
        self._begun = (rows.ticket(rows.ready), len(sequence))
        if len(sequence) < rows.lengths[rows.ready] - 1:
            return
        first, rows.ready = rows.ready, rows.ready + 1
        equal = rows.ready
        while equal < rows.count and np.array_equal(rows.tokens_of(equal)[:-1], sequence):
            equal += 1
        if equal > rows.ready:
            self._cache.write(slice(rows.ready, equal), self._cache.read(first, len(sequence)))
            rows.ready = equal

    def _fits(self, sequences: list[I64], length: int, tokens: int) -> bool:
        """Whether a sequence of `length`, no shorter than those before it, may join them in a forward of `tokens`."""
        if self.config.deterministic:
            return _rounded(length) == _rounded(len(sequences[-1])) and len(sequences) < self._padded_prompts(length)
        return (len(sequences) + 1) * length <= tokens

    def _padded_prompts(self, length: int) -> int:
        """Rows of a deterministic prefill forward, which follow from the length alone."""
        return max(1, min(PADDED_PROMPTS, self.config.prefill_tokens // _rounded(length)))

    def _prefill_forward(self, sequences: list[I64], sources: I64, begun: int = 0) -> None:
        """Into the next rows go the sequences that `sources` say; behind `begun` tokens that are there, if one does."""
        count, length = len(sequences), len(sequences[-1])  # the longest: rows are sorted
        if length == 0:
            return
        if self.config.deterministic:
            count, length = self._padded_prompts(length), _rounded(length)
        ids_UT = np.zeros((count, length), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            ids_UT[row, : len(sequence)] = sequence
        seen_1L = torch.arange(begun + length, device=self._model.device)[None]
        positions_1T = seen_1L[:, begun:]
        causal_TL = seen_1L <= positions_1T.T  # padding is on the right, where no real token looks
        self._cache.for_prefill(self._rows.ready, sources, begun)
        positions_1T = positions_1T.clamp(max=self.max_context - 1)  # padding may reach beyond what the model knows
        ids = torch.from_numpy(ids_UT).to(self._model.device)
        self._forward(ids, positions_1T, self._additive(causal_TL)[None, None])

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits of the last position, float32 [N, V]."""
        self.forward_passes += 1
        out = self._model(
            input_ids=ids,
            position_ids=positions.expand(ids.shape),
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        """0 where visible, -inf elsewhere: the form of mask that every attention of transformers takes."""
        return torch.zeros(visible.shape, dtype=self._model.dtype, device=visible.device).masked_fill_(
            ~visible, -torch.inf
        )


def _rounded(length: int) -> int:
    return -(-length // PADDED_TOKENS) * PADDED_TOKENS


def _extended(values_N: I64, empty: int) -> I64:
    """The values, and a zero for each of `empty` rows that nobody runs in."""
    return np.concatenate([values_N, np.zeros(empty, dtype=np.int64)]) if empty else values_N


def _max_context(model: PreTrainedModel) -> int:
    """Tokens of the longest sequence, `sys.maxsize` if the model has no limit. Raises `UnsupportedModelError`."""
    config, name = model.config.get_text_config(), type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or [])
    if getattr(model, "_is_stateful", False) or kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"{name} has layers that are not plain attention {sorted(kinds)}: the built-in engine cannot resume those"
        )
    lacking = {"position_ids", "logits_to_keep"} - inspect.signature(model.forward).parameters.keys()
    if lacking:
        raise UnsupportedModelError(f"{name}.forward takes no {sorted(lacking)}, which the built-in engine needs")
    limit = getattr(config, "max_position_embeddings", None) or sys.maxsize
    window = getattr(config, "sliding_window", None)
    if window is not None and (not kinds or "sliding_attention" in kinds):
        limit = min(limit, window)
    return int(limit)
