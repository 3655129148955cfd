"""A trajectory of several turns: what its flat arrays must keep to, and how they are read.

Of its T tokens the model made some, the turns; between them stand observations. All may be cut up into sequences, each
with a prompt of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schemas.errors import MalformedMessage
from schemas.fields import FloatArray, IntArray, Segments

Mask = npt.NDArray[np.bool_]


def check_steps(name: str, rewards: FloatArray, ends: IntArray, tokens: int, reward: float | None) -> None:
    """Process rewards are one for each token and come with a reward; steps end within. Raises `MalformedMessage`."""
    rewarded = len(rewards)
    if rewarded not in (0, tokens) or (rewarded and reward is None):
        raise MalformedMessage(f"{name}.token_rewards are {rewarded} for {tokens} tokens, or without a reward")
    if len(ends) and not (ends[0] >= 0 and ends[-1] < rewarded and (ends[1:] > ends[:-1]).all()):
        raise MalformedMessage(f"{name}.step_ends must ascend and lie within {rewarded} token_rewards")


def check_spans(name: str, spans: IntArray, tokens: int) -> None:
    """Observations are pairs `(start, count)` that ascend within `tokens` tokens and leave some of them to the model.

    Raises `MalformedMessage`.
    """
    if not len(spans):
        return
    if len(spans) % 2:
        raise MalformedMessage(f"{name}.observations must be pairs (start, count)")
    starts, counts = spans[::2].astype("<i8"), spans[1::2].astype("<i8")
    ends = starts + counts
    if not (starts[0] >= 0 and ends[-1] <= tokens and (counts > 0).all() and (starts[1:] >= ends[:-1]).all()):
        raise MalformedMessage(f"{name}.observations must ascend, apart from each other, within {tokens} tokens")
    if counts.sum() == tokens:
        raise MalformedMessage(f"{name}.observations are all of its {tokens} tokens: the model made none")


def check_observations(spans: IntArray, logprobs: FloatArray) -> None:
    """Observations are spans as `check_spans` has them, and their logprobs are 0. Raises `MalformedMessage`."""
    check_spans("rollout", spans, len(logprobs))
    if len(spans) and logprobs[~model_tokens(spans, len(logprobs))].any():
        raise MalformedMessage("rollout.logprobs must be 0 at observations, which no policy sampled")


def check_sequences(pairs: IntArray, prompt_tokens: int, tokens: int) -> None:
    """Sequences are pairs `(prompt tokens, tokens)` that cut both up. Raises `MalformedMessage`."""
    prompts, counts = pairs[::2].astype("<i8"), pairs[1::2].astype("<i8")
    if not len(pairs):
        return
    if len(pairs) % 2 or not ((prompts > 0).all() and (counts > 0).all()):
        raise MalformedMessage("rollout.sequences must be pairs (prompt tokens, tokens) of at least 1 each")
    if (prompts.sum(), counts.sum()) != (prompt_tokens, tokens):
        raise MalformedMessage(f"rollout.sequences must cut up {prompt_tokens} prompt tokens and {tokens} tokens")


def model_tokens(observations: IntArray, tokens: int) -> Mask:
    """Which of `tokens` tokens the model made, bool [T]: all but the observations, valid pairs `(start, count)`."""
    if not len(observations):
        return np.ones(tokens, np.bool_)
    edges = np.zeros(tokens + 1, np.int8)
    edges[observations[::2]] += 1
    edges[observations[::2] + observations[1::2]] -= 1
    made: Mask = np.cumsum(edges[:-1]) == 0
    return made


def model_segments(segments: Segments, observations: IntArray) -> Segments:
    """The `(version, count)` runs of the tokens that the model made: `model_segments(((3, 5), (4, 2)), [1, 2]) ==
    ((3, 3), (4, 2))`."""
    if not len(observations):
        return segments
    versions, counts = np.array(segments, np.int64).T
    made = model_tokens(observations, int(counts.sum()))
    left = np.add.reduceat(made.astype(np.int64), np.cumsum(counts) - counts)
    return tuple((int(version), int(count)) for version, count in zip(versions, left, strict=True) if count)


def cuts(sequences: IntArray, prompt_tokens: int, tokens: int) -> list[tuple[slice, slice]]:
    """Where each sequence lies in `prompt_tokens` and in `tokens`; one that is all of both if `sequences` is empty."""
    if not len(sequences):
        return [(slice(0, prompt_tokens), slice(0, tokens))]
    counts = sequences.reshape(-1, 2).astype(np.int64)
    ends = counts.cumsum(axis=0)
    bounds = np.hstack([ends - counts, ends]).tolist()
    return [(slice(p, p_end), slice(t, t_end)) for p, t, p_end, t_end in bounds]


def last_turn(observations: IntArray, sequences: IntArray, tokens: int) -> tuple[int, int]:
    """The first token of the last turn, and one past its last; `tokens` is at least 1."""
    made = model_tokens(observations, tokens)
    end = int(turn_ends(made, sequences)[-1]) + 1
    before = np.concatenate([[0], np.flatnonzero(~made[:end]) + 1, np.cumsum(sequences[1::2], dtype=np.int64)])
    return int(before[before < end].max()), end


def turn_ends(made: Mask, sequences: IntArray) -> npt.NDArray[np.int64]:
    """The last tokens of the turns, int64 [K], ascending. A turn is a run of tokens that the model `made`, bool [T],
    one after the other within a sequence."""
    ends = made.copy()
    ends[:-1] &= ~made[1:]
    last = np.cumsum(sequences[1::2], dtype=np.int64) - 1
    ends[last] |= made[last]
    return np.flatnonzero(ends)
