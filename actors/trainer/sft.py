"""Supervised warm start: cross entropy on response tokens, in batches of similar length."""

from collections.abc import Callable, Iterator, Sequence
from random import Random

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.trainer.config import SftConfig
from actors.trainer.forward import ScoredTokens, collate, response_logprobs
from actors.trainer.packing import Row

POOL = 512  # examples that are sorted by length together: enough that the rows of a batch are of nearly one length

Example = Callable[[float, Random], tuple[Sequence[int], Sequence[int]]]


def train_sft(
    model: PreTrainedModel,
    examples: Example,
    config: SftConfig,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train `model` in place for `config.steps` optimizer steps; returns each step's loss, in nats a response token.

    `examples(progress, random)` draws one example as (prompt tokens, response tokens), both non-empty; progress in
    [0, 1) says how much of the training is done, so that the data may change on the way. `on_step(step, loss)` is
    called after every step. The same seed gives the same weights on a CPU.
    """
    model.train(False)  # no dropout, as in reinforcement learning
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
    )
    losses: list[float] = []
    batches = _batches(examples, config, progress=lambda: len(losses) / config.steps)
    for step, batch in zip(range(config.steps), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _schedule(step, config)
        rows = [Row((i,), len(example)) for i, example in enumerate(batch)]
        micro_batch = collate(rows, batch, shared=False, device=model.device)
        loss = -response_logprobs(model, micro_batch)[0].mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if on_step is not None:
            on_step(step, losses[-1])
    return losses


def _schedule(step: int, config: SftConfig) -> float:
    """Linear warm-up, then linear decay to `min_lr_ratio`."""
    return min(1.0, (step + 1) / max(1, config.warmup_steps)) * max(config.min_lr_ratio, 1 - step / config.steps)


def _batches(examples: Example, config: SftConfig, progress: Callable[[], float]) -> Iterator[list[ScoredTokens]]:
    """Endless: sort a pool by length, cut it into batches of about `batch_tokens` padded tokens, shuffle those."""
    random = Random(config.seed)
    while True:
        now = progress()
        pool = sorted((_example(*examples(now, random)) for _ in range(POOL)), key=len)
        batches: list[list[ScoredTokens]] = [[]]
        for example in pool:
            if batches[-1] and (len(batches[-1]) + 1) * len(example) > config.batch_tokens:
                batches.append([])
            batches[-1].append(example)
        random.shuffle(batches)
        yield from batches


def _example(prompt: Sequence[int], response: Sequence[int]) -> ScoredTokens:
    return ScoredTokens(
        np.asarray(prompt, dtype=np.int32),
        np.asarray(response, dtype=np.int32),
        np.ones(len(response), dtype=np.bool_),
    )
