"""The tokens of a rollout as runs of one kind: made by one version, or told to the model."""

from __future__ import annotations

import dataclasses

import numpy as np

from schemas import Segments
from schemas.fields import IntArray
from schemas.trajectory import model_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """`count` tokens from `start` on, side by side in one sequence; of a run that was `told` nobody made a token."""

    version: int
    start: int
    count: int
    told: bool = False
    sequence: int = 0


def runs_of(segments: Segments, observations: IntArray, sequences: IntArray) -> list[Run]:
    """The runs in their order, as long as can be."""
    if not segments:
        return []
    versions, counts = np.array(segments, np.int64).T
    tokens = int(counts.sum())
    told = ~model_tokens(observations, tokens)
    version = np.repeat(versions, counts)
    ends = np.cumsum(sequences[1::2], dtype=np.int64) if len(sequences) else np.array([tokens])
    sequence = np.searchsorted(ends, np.arange(tokens), side="right")
    kinds = np.stack([version, told, sequence])
    starts = np.concatenate([[0], 1 + np.flatnonzero((kinds[:, 1:] != kinds[:, :-1]).any(axis=0))])
    lengths = np.diff(np.append(starts, tokens))
    return [
        Run(int(version[at]), at, count, bool(told[at]), int(sequence[at]))
        for at, count in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
