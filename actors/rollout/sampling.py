"""Drawing one token per row, so that a sample's tokens depend on its own seed and logits alone.

Shape letters: N rows, V vocabulary. Each row draws with one uniform number from a counter-based generator keyed by
its seed, at the counter of the token's index in the answer. So neighbours in the batch, and a move to another worker
in mid-answer, change nothing: there is no generator state to carry along.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.rollout.engine import NonFiniteLogitsError

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: U64) -> U64:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014; constants of Vigna's splitmix64.c), elementwise."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream_key(seed: int) -> int:
    """The start of the stream that `seed` names, a uint64. Mixed, so that neighbouring seeds share no numbers."""
    return int(_mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)[0])


def uniforms(keys: U64, positions: I64) -> F64:
    """Number `positions[i]` of the stream that starts at `keys[i]`, in [0, 1) with 53 random bits. [N] -> [N] float64.

    Output n of a splitmix64 generator seeded with the key: mix(key + (n + 1)·golden).
    """
    z = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def truncate(logits_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Set to -inf what top-k and then top-p cut off. top_k int64, 0 = off; top_p float64, 1 = off.

    Top-k keeps the k largest, ties to the smaller id. Top-p keeps the fewest of those that together reach mass p under
    the distribution renormalised after top-k (Holtzman et al. 2019), never fewer than one.
    """
    sorted_NV, order_NV = torch.sort(logits_NV, dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
    cut_NV = (ranks_V >= top_k_N[:, None]) & (top_k_N > 0)[:, None]
    probs_NV = torch.softmax(sorted_NV.double().masked_fill(cut_NV, -torch.inf), -1)
    before_NV = probs_NV.cumsum(-1) - probs_NV
    cut_NV |= (before_NV >= top_p_N[:, None]) & (top_p_N < 1.0)[:, None] & (ranks_V > 0)
    return logits_NV.masked_fill(torch.zeros_like(cut_NV).scatter_(1, order_NV, cut_NV), -torch.inf)


def sample(
    logits_NV: Tensor, uniform_N: F64, temperature_N: NDArray[np.float32], top_k_N: I64, top_p_N: F64
) -> tuple[I64, F64]:
    """Draw one token per row by inverting its cumulative distribution: tokens int64 [N], logprobs float64 [N].

    logits float32 [N, V]; uniform in [0, 1); parameters as in `engine.Sampling`, one per row. The logprob is that of
    the distribution drawn from, after temperature and truncation (float32 log-softmax); 0.0 for a greedy row.

    The token is the first whose cumulative mass exceeds u·total, in float64. u ≤ 1 - 2⁻⁵³ keeps u·total below the total
    after rounding, so one always exists, and a token of probability zero adds no mass and is never the first.

    Raises `NonFiniteLogitsError` when a row has NaN or +inf logits, or -inf only.
    """
    greedy_N = temperature_N == 0.0
    if (temperature_N != 1.0).any():
        divisor_N = torch.from_numpy(np.where(greedy_N, np.float32(1.0), temperature_N)).to(logits_NV.device)
        logits_NV = logits_NV / divisor_N[:, None]
    cut_N = (top_k_N > 0) | (top_p_N < 1.0)
    if cut_N.any():
        rows = torch.from_numpy(np.flatnonzero(cut_N)).to(logits_NV.device)
        top_k, top_p = (torch.from_numpy(a[cut_N]).to(logits_NV.device) for a in (top_k_N, top_p_N))
        logits_NV = logits_NV.index_copy(0, rows, truncate(logits_NV[rows], top_k, top_p))
    logprobs_NV = torch.log_softmax(logits_NV, -1)
    mass_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
    target_N1 = mass_NV[:, -1:] * torch.from_numpy(uniform_N).to(logits_NV.device)[:, None]
    token_N1 = torch.searchsorted(mass_NV, target_N1, right=True)
    if greedy_N.any():
        certain_N1 = torch.from_numpy(greedy_N).to(logits_NV.device)[:, None]
        token_N1 = torch.where(certain_N1, logits_NV.argmax(-1, keepdim=True), token_N1)
    if not bool(torch.isfinite(target_N1).all()):
        raise NonFiniteLogitsError(
            "the model returned NaN or infinite logits: the policy has diverged (lower the learning rate, or go back "
            "to an earlier version), or its dtype overflows (use float32)"
        )
    logprob_N = logprobs_NV.gather(1, token_N1)[:, 0]
    if greedy_N.any():
        logprob_N = logprob_N.masked_fill(torch.from_numpy(greedy_N).to(logits_NV.device), 0.0)
    return token_N1[:, 0].cpu().numpy(), logprob_N.double().cpu().numpy()
