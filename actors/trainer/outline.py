"""What ranks tell each other of their samples, so that all of them assign the same credit. No torch here.

The tokens stay where they were fetched; of a sample of another rank only its shape, its masks and its rewards are
known, and its tokens read as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from actors.trainer.ranks import Ranks
from actors.trainer.samples import TrainSample

Array = npt.NDArray[Any]


def all_samples(own: Sequence[TrainSample], ranks: Ranks, *, whole: bool) -> list[tuple[int, TrainSample]]:
    """The samples of all ranks, each with its rank; those of others outlined, or `whole` where a function of the user's
    may look at anything."""
    if ranks.count == 1:
        return [(0, sample) for sample in own]
    out: list[tuple[int, TrainSample]] = []
    for rank, told in enumerate(ranks.gather(msgpack.packb([_outline(s, whole) for s in own]))):
        samples = own if rank == ranks.rank else [_sample(fields) for fields in msgpack.unpackb(told)]
        out.extend((rank, sample) for sample in samples)
    return out


def spread(
    arrays: Sequence[Array], owners: npt.NDArray[np.int64], ranks: Ranks, lengths: npt.NDArray[np.int64]
) -> list[Array]:
    """Arrays [m_i] of each sample, where each rank has computed those of its own samples only.

    All are of one dtype. `owners` int [B] is the rank of each sample, `lengths` int [B] its m_i.
    """
    if ranks.count == 1:
        return list(arrays)
    own = [arrays[i] for i in np.flatnonzero(owners == ranks.rank)]
    dtype = arrays[0].dtype if len(arrays) else np.dtype(np.float32)
    told = ranks.gather(np.concatenate([np.zeros(0, dtype), *own]).tobytes())
    out: list[Array] = [np.zeros(0, dtype)] * len(arrays)
    for rank, flat in enumerate(told):
        places = np.flatnonzero(owners == rank)
        parts = np.split(np.frombuffer(flat, dtype).copy(), np.cumsum(lengths[places]))
        for i, part in zip(places.tolist(), parts, strict=False):
            out[i] = part
    return out


def _outline(sample: TrainSample, whole: bool) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "prompt": len(sample.prompt_tokens),
        "response": len(sample.tokens),
        "trained": np.packbits(sample.loss_mask).tobytes(),
        "made": np.packbits(sample.made).tobytes(),
        "reward": sample.reward,
        "finish": sample.finish,
        "token_rewards": None if sample.token_rewards is None else sample.token_rewards.tobytes(),
        "step_ends": None if sample.step_ends is None else sample.step_ends.astype(np.int32).tobytes(),
        "sequences": None if sample.sequences is None else sample.sequences.astype(np.int32).tobytes(),
        "asked": None if sample.asked is None else sample.asked.astype(np.int32).tobytes(),
        "whole": [
            sample.prompt_tokens.astype(np.int32).tobytes(),
            sample.tokens.astype(np.int32).tobytes(),
            sample.behaviour_logprobs.astype(np.float32).tobytes(),
            None if sample.versions is None else sample.versions.astype(np.int32).tobytes(),
        ]
        if whole
        else None,
    }


def _sample(fields: dict[str, Any]) -> TrainSample:
    P, T = fields["prompt"], fields["response"]
    rewards = fields["token_rewards"]
    if fields["whole"] is not None:
        prompt, tokens, versions = (_ints(fields["whole"][place]) for place in (0, 1, 3))
        logprobs: npt.NDArray[np.float32] = np.frombuffer(fields["whole"][2], np.float32)
    else:
        prompt, tokens = np.broadcast_to(np.int32(0), P), np.broadcast_to(np.int32(0), T)
        logprobs = np.broadcast_to(np.float32(0), T)
        versions = _bits(fields["made"], T).astype(np.int32) - 1  # enough to tell what a policy made
    return TrainSample(
        sample_id=fields["sample_id"],
        group_id=fields["group_id"],
        prompt_tokens=prompt,
        tokens=tokens,
        behaviour_logprobs=logprobs,
        loss_mask=_bits(fields["trained"], T),
        reward=fields["reward"],
        finish=fields["finish"],
        versions=versions,
        token_rewards=None if rewards is None else np.frombuffer(rewards, np.float32),
        step_ends=_ints(fields["step_ends"]),
        sequences=_ints(fields["sequences"]),
        asked=_ints(fields["asked"]),
    )


def _ints(packed: bytes | None) -> Any:
    return None if packed is None else np.frombuffer(packed, np.int32)


def _bits(packed: bytes, n: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=n).astype(np.bool_)
