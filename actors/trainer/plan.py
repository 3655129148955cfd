"""A training step, laid out before anything is learned: mini-batches of packed micro-batches with what the loss needs.

What is laid out is a function of the seed, the step and the *set* of samples, whatever their order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.trainer.aggregation import token_scales
from actors.trainer.config import TrainerConfig
from actors.trainer.credit import trained_mask
from actors.trainer.forward import MicroBatch, ScoredTokens, collate, model_traits, scored_sequences
from actors.trainer.outline import all_samples, spread
from actors.trainer.packing import Row, pack
from actors.trainer.ranks import Ranks
from actors.trainer.samples import TrainSample

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of a step in their one order, with their trained tokens m_i, and which rank trains which.

    A sample is one sequence or several; what is told of its trained tokens is told of all of them, one after the other.
    """

    samples: tuple[TrainSample, ...]
    masks: tuple[npt.NDArray[np.bool_], ...]  # [T_i] each: the trained tokens
    trained: npt.NDArray[np.int64]  # [B], m_i
    sequences: tuple[ScoredTokens, ...]  # [S], those of a sample side by side
    first: npt.NDArray[np.int64]  # [B + 1]: those of sample i are first[i] to first[i + 1]
    sample: npt.NDArray[np.int64]  # [S]: whose they are
    parts: tuple[slice, ...]  # [S]: which of the sample's m_i trained tokens are the sequence's
    shared: bool  # whether sequences may share rows
    owners: npt.NDArray[np.int64]  # [B], ranks
    ranks: Ranks

    @property
    def own(self) -> npt.NDArray[np.bool_]:
        """bool [B]: the samples whose tokens this rank has."""
        own: npt.NDArray[np.bool_] = self.owners == self.ranks.rank
        return own

    def sequences_of(self, samples: Sequence[int], *, last: bool = False) -> list[int]:
        """The sequences of these samples that hold trained tokens, and by option the last one of each in any case."""
        out = []
        for i in samples:
            end = int(self.first[i + 1])
            of_sample = range(int(self.first[i]), end)
            out += [s for s in of_sample if self.parts[s].stop > self.parts[s].start or (last and s == end - 1)]
        return out


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch with what the loss needs, by name; n = its trained tokens."""

    batch: MicroBatch
    tokens: Mapping[str, Tensor]  # float32 [n] each, `versions` int64

    @property
    def empty(self) -> bool:
        """Whether it holds no trained token, and only keeps this rank in step with the others."""
        return not len(self.batch.targets)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one optimizer step learns from."""

    denominator: int  # N: trained tokens of all samples, of those without gradient too
    micros: tuple[Micro, ...]


def ordered(
    step: int,
    samples: Sequence[TrainSample],
    model: PreTrainedModel,
    config: TrainerConfig,
    ranks: Ranks,
) -> Batch:
    """The samples of all ranks by group and id; `samples` are this rank's. Raises ValueError if one occurs twice."""
    told = all_samples(samples, ranks, whole=config.advantage.function is not None)
    told.sort(key=lambda pair: (pair[1].group_id, pair[1].sample_id))
    in_order = [sample for _, sample in told]
    if len({s.sample_id for s in in_order}) != len(in_order):
        raise ValueError(f"step {step}: a sample_id occurs twice; a sample is trained once (invariant I3)")
    masks = [trained_mask(s, config) for s in in_order]
    cut_up = [scored_sequences(s.prompt_tokens, s.tokens, m, s.sequences) for s, m in zip(in_order, masks, strict=True)]
    sequences = [sequence for of_sample in cut_up for sequence in of_sample]
    parts: list[slice] = []
    for of_sample in cut_up:
        ends = np.cumsum([int(sequence.scored.sum()) for sequence in of_sample]).tolist()
        parts += map(slice, [0, *ends[:-1]], ends)
    longest = max((len(s) for s, part in zip(sequences, parts, strict=True) if part.stop > part.start), default=0)
    counts = [len(of_sample) for of_sample in cut_up]
    return Batch(
        samples=tuple(in_order),
        masks=tuple(masks),
        trained=np.array([int(mask.sum()) for mask in masks], dtype=np.int64),
        sequences=tuple(sequences),
        first=np.cumsum([0, *counts]),
        sample=np.repeat(np.arange(len(counts)), counts),
        parts=tuple(parts),
        shared=model_traits(model).can_share_rows(longest),
        owners=np.array([rank for rank, _ in told], dtype=np.int64),
        ranks=ranks,
    )


def lay_out(
    step: int,
    batch: Batch,
    useful: npt.NDArray[np.bool_],
    per_token: Mapping[str, Sequence[Array]],
    config: TrainerConfig,
    *,
    max_new_tokens: int | None,
    device: torch.device,
) -> tuple[list[MiniBatch], list[list[Row]]]:
    """Seeded mini-batches of the `useful` samples (bool [B]), and the rows that they were packed into, of all ranks.

    `per_token` are arrays [m_i] for each sample of this rank. The others count in each mini-batch's N and in its
    aggregation. A mini-batch without a useful sample is left out: a step on zero gradients would only move the weights
    by momentum.

    The mini-batches and their N are those of one rank; a rank holds the micro-batches of its own samples, filled up to
    the number of the rank with the most by such that hold no trained token.
    """
    shuffled = np.random.default_rng((config.seed, step)).permutation(len(batch.samples))
    minibatches: list[MiniBatch] = []
    packed: list[list[Row]] = []
    for members in np.array_split(shuffled, config.minibatches):
        chosen = [int(i) for i in members if useful[i]]
        scales = token_scales(config.aggregation, batch.trained[members], max_new_tokens)
        if scales is not None:
            spread: list[Array] = [np.zeros(0)] * len(batch.samples)
            for i, scale in zip(members, scales, strict=True):
                spread[i] = np.full(batch.trained[i], scale)
            per_token = {**per_token, "scale": spread}
        ranks = range(batch.ranks.count)
        shares = [batch.sequences_of([i for i in chosen if batch.owners[i] == rank]) for rank in ranks]
        rows = [_packed(batch, share, config) for share in shares]
        if not any(rows):
            continue
        packed += [of_micro for of_rank in rows for of_micro in of_rank]
        share, own = shares[batch.ranks.rank], rows[batch.ranks.rank]
        micros = [_micro(r, share, batch, per_token, device) for r in own]
        micros += [_filler(batch, device)] * (max(map(len, rows)) - len(own))
        minibatches.append(MiniBatch(int(batch.trained[members].sum()), tuple(micros)))
    return minibatches, packed


def ask(
    batch: Batch,
    forward: Callable[[MicroBatch], tuple[Tensor, Tensor | None]],
    config: TrainerConfig,
    device: torch.device,
) -> tuple[list[npt.NDArray[np.float32]], npt.NDArray[np.float64]]:
    """What a frozen model says of every trained token: [m_i] for each sample, and one number for each sample, [B].

    Each rank asks for its own samples, and is told the rest. `forward` gives [n] and, if it has it, [S] of a
    micro-batch; that of a sample's last sequence is the sample's. Without gradient; one micro-batch at a time.
    """
    tokens = [np.zeros(n if own else 0, np.float32) for n, own in zip(batch.trained, batch.own, strict=True)]
    ends = np.zeros(len(batch.samples))
    chosen = batch.sequences_of(np.flatnonzero((batch.trained > 0) & batch.own).tolist(), last=True)
    for rows in _packed(batch, chosen, config):
        micro = collate(rows, [batch.sequences[s] for s in chosen], shared=batch.shared, device=device)
        with torch.no_grad():
            of_tokens, of_ends = forward(micro)
        order = np.array([chosen[s] for s in micro.sequences])
        counts = [batch.parts[s].stop - batch.parts[s].start for s in order]
        found = np.split(of_tokens.float().cpu().numpy(), np.cumsum(counts)[:-1])
        for s, values in zip(order, found, strict=True):
            tokens[batch.sample[s]][batch.parts[s]] = values
        if of_ends is not None:
            last = batch.first[batch.sample[order] + 1] - 1 == order
            ends[batch.sample[order[last]]] = of_ends.double().cpu().numpy()[last]
    of_all = spread(tokens, batch.owners, batch.ranks, batch.trained)
    ends_of_all = spread(list(ends[:, None]), batch.owners, batch.ranks, np.ones_like(batch.trained))
    return of_all, np.concatenate([np.zeros(0), *ends_of_all])


def _filler(batch: Batch, device: torch.device) -> Micro:
    """A micro-batch without a trained token: its gradient is zero, and where models lie in shards all ranks must take
    part in each forward."""
    nothing = ScoredTokens(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.bool_))
    return Micro(collate([Row((0,), 2)], [nothing], shared=batch.shared, device=device), {})


def _packed(batch: Batch, chosen: Sequence[int], config: TrainerConfig) -> list[list[Row]]:
    """Rows of the `chosen` sequences, which they name by their places among these."""
    return pack(
        [len(batch.sequences[s]) for s in chosen],
        micro_batch_tokens=config.micro_batch_tokens,
        row_tokens=config.row_tokens,
        share_rows=batch.shared,
    )


def _micro(
    rows: Sequence[Row],
    chosen: Sequence[int],
    batch: Batch,
    per_token: Mapping[str, Sequence[Array]],
    device: torch.device,
) -> Micro:
    micro = collate(rows, [batch.sequences[s] for s in chosen], shared=batch.shared, device=device)
    order = [chosen[s] for s in micro.sequences]

    def tensor(arrays: Sequence[Array]) -> Tensor:
        flat = np.concatenate([arrays[batch.sample[s]][batch.parts[s]] for s in order])
        kind = np.int64 if flat.dtype.kind == "i" else np.float32
        return torch.from_numpy(flat.astype(kind)).to(device)

    return Micro(micro, {name: tensor(arrays) for name, arrays in per_token.items()})
