"""What the flat arrays of a trajectory of several turns must keep to."""

from __future__ import annotations

from schemas.errors import MalformedMessage
from schemas.fields import FloatArray, IntArray


def check_steps(name: str, rewards: FloatArray, ends: IntArray, tokens: int, reward: float | None) -> None:
    """Process rewards are one for each token and come with a reward; steps end within. Raises `MalformedMessage`."""
    rewarded = len(rewards)
    if rewarded not in (0, tokens) or (rewarded and reward is None):
        raise MalformedMessage(f"{name}.token_rewards are {rewarded} for {tokens} tokens, or without a reward")
    if len(ends) and not (ends[0] >= 0 and ends[-1] < rewarded and (ends[1:] > ends[:-1]).all()):
        raise MalformedMessage(f"{name}.step_ends must ascend and lie within {rewarded} token_rewards")


def check_observations(spans: IntArray, tokens: int) -> None:
    """Observations are pairs `(start, count)` that ascend within `tokens` tokens. Raises `MalformedMessage`."""
    starts, counts = spans[::2], spans[1::2]
    if len(spans) % 2:
        raise MalformedMessage("rollout.observations must be pairs (start, count)")
    ends = starts.astype("<i8") + counts
    if len(spans) and not (
        starts[0] >= 0 and ends[-1] <= tokens and (counts > 0).all() and (starts[1:] >= ends[:-1]).all()
    ):
        raise MalformedMessage(f"rollout.observations must ascend, apart from each other, within {tokens} tokens")


def check_sequences(pairs: IntArray, prompt_tokens: int, tokens: int) -> None:
    """Sequences are pairs `(prompt tokens, tokens)` that cut both up. Raises `MalformedMessage`."""
    prompts, counts = pairs[::2].astype("<i8"), pairs[1::2].astype("<i8")
    if not len(pairs):
        return
    if len(pairs) % 2 or not ((prompts > 0).all() and (counts > 0).all()):
        raise MalformedMessage("rollout.sequences must be pairs (prompt tokens, tokens) of at least 1 each")
    if (prompts.sum(), counts.sum()) != (prompt_tokens, tokens):
        raise MalformedMessage(f"rollout.sequences must cut up {prompt_tokens} prompt tokens and {tokens} tokens")
