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
from actors.trainer.forward import MicroBatch, ScoredTokens, collate, model_traits
from actors.trainer.outline import all_samples, spread
from actors.trainer.packing import Row, pack
from actors.trainer.ranks import Ranks
from actors.trainer.samples import TrainSample

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of a step in their one order, with their trained tokens m_i, and which rank trains which."""

    samples: tuple[TrainSample, ...]
    sequences: tuple[ScoredTokens, ...]
    trained: npt.NDArray[np.int64]  # [B], m_i
    shared: bool  # whether sequences may share rows
    owners: npt.NDArray[np.int64]  # [B], ranks
    ranks: Ranks

    @property
    def own(self) -> npt.NDArray[np.bool_]:
        """bool [B]: the samples whose tokens this rank has."""
        own: npt.NDArray[np.bool_] = self.owners == self.ranks.rank
        return own


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
    sequences = [ScoredTokens(s.prompt_tokens, s.tokens, trained_mask(s, config)) for s in in_order]
    trained = np.array([int(s.scored.sum()) for s in sequences], dtype=np.int64)
    longest = max((len(s) for s, n in zip(sequences, trained, strict=True) if n), default=0)
    owners = np.array([rank for rank, _ in told], dtype=np.int64)
    shared = model_traits(model).can_share_rows(longest)
    return Batch(tuple(in_order), tuple(sequences), trained, shared, owners, ranks)


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
        shares = [[i for i in chosen if batch.owners[i] == rank] for rank in range(batch.ranks.count)]
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
    micro-batch. Without gradient; one micro-batch at a time.
    """
    tokens = [np.zeros(0, np.float32)] * len(batch.samples)
    ends = np.zeros(len(batch.samples))
    chosen = [int(i) for i in np.flatnonzero((batch.trained > 0) & batch.own)]
    for rows in _packed(batch, chosen, config):
        micro = collate(rows, [batch.sequences[i] for i in chosen], shared=batch.shared, device=device)
        with torch.no_grad():
            of_tokens, of_ends = forward(micro)
        order = [chosen[i] for i in micro.sequences]
        parts = np.split(of_tokens.float().cpu().numpy(), np.cumsum(batch.trained[order])[:-1])
        for i, part in zip(order, parts, strict=True):
            tokens[i] = part
        if of_ends is not None:
            ends[order] = of_ends.double().cpu().numpy()
    of_all = spread(tokens, batch.owners, batch.ranks, batch.trained)
    ends_of_all = spread(list(ends[:, None]), batch.owners, batch.ranks, np.ones_like(batch.trained))
    return of_all, np.concatenate([np.zeros(0), *ends_of_all])


def _filler(batch: Batch, device: torch.device) -> Micro:
    """A micro-batch without a trained token: its gradient is zero, and where models lie in shards all ranks must take
    part in each forward."""
    nothing = ScoredTokens(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.bool_))
    return Micro(collate([Row((0,), 2)], [nothing], shared=batch.shared, device=device), {})


def _packed(batch: Batch, chosen: Sequence[int], config: TrainerConfig) -> list[list[Row]]:
    return pack(
        [len(batch.sequences[i]) for i in chosen],
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
    micro = collate(rows, [batch.sequences[i] for i in chosen], shared=batch.shared, device=device)
    order = [chosen[i] for i in micro.sequences]

    def tensor(arrays: Sequence[Array]) -> Tensor:
        flat = np.concatenate([arrays[i] for i in order])
        kind = np.int64 if flat.dtype.kind == "i" else np.float32
        return torch.from_numpy(flat.astype(kind)).to(device)

    return Micro(micro, {name: tensor(arrays) for name, arrays in per_token.items()})
