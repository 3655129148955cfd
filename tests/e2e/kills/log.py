"""A log of a run whose trainer has yet to work: every sample was made by version 0, every batch is decided."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from actors.reward.actor import scored_of
from actors.reward.verdict import Verdict
from bus.port import Bus
from ops.recipe import Recipe
from recipes.running_total import WORDS
from schemas import Batch, Control, Message, Prompt, Rollout, Scored

EOS = 1
TOKENS_MAX = 40


async def lay_start(bus: Bus, recipe: Recipe, folder: str) -> None:
    """Announce the start of a run."""
    await bus.setup(recipe.bus.ack_wait_s)
    await bus.publish(Control(action="start", nonce="start", recipe=recipe.to_log(), detail=folder))


async def lay_log(bus: Bus, recipe: Recipe, seed: int) -> None:
    """Store prompts, rollouts, verdicts and batches of all steps. Version 0 must have been announced before."""
    for messages in log_of(recipe, seed):
        await bus.publish_fenced(messages, 0)


async def lay_end(bus: Bus, recipe: Recipe) -> None:
    """Announce the end, as the controller does when all steps are done."""
    await bus.publish(Control(action="stop", nonce=f"end-{recipe.steps}"))


def log_of(recipe: Recipe, seed: int) -> list[Sequence[Message]]:
    """Prompts, rollouts, verdicts and batches, each in the order of their sequences; the same seed gives the same."""
    random = Random(seed)
    groups, size = recipe.steps * recipe.controller.batch_groups, recipe.controller.group_size
    prompts: list[Prompt] = []
    rollouts: list[Rollout] = []
    verdicts: list[Scored] = []
    for group in range(groups):
        question = [random.randrange(5, len(WORDS)) for _ in range(random.randint(3, 12))]
        text = " ".join(WORDS[token] for token in question)
        for index in range(size):
            prompts.append(
                Prompt(group_id=group, index=index, group_size=size, prompt=text, task={}, seed=index, min_version=0)
            )
            rollouts.append(_rollout(random, prompts[-1], question))
            verdicts.append(_verdict(random, rollouts[-1], len(rollouts)))
    return [prompts, rollouts, verdicts, [_batch(step, recipe, verdicts, groups) for step in range(recipe.steps)]]


def _rollout(random: Random, prompt: Prompt, question: list[int]) -> Rollout:
    ends = random.random() < 0.8
    answer = [random.randrange(5, len(WORDS)) for _ in range(random.randint(4, TOKENS_MAX))]
    tokens = [*answer, EOS] if ends else answer
    return Rollout(
        group_id=prompt.group_id,
        index=prompt.index,
        group_size=prompt.group_size,
        prompt=prompt.prompt,
        task={},
        prompt_tokens=question,
        tokens=tokens,
        # near those of the untrained model, so that ratios are neither all clipped nor all alike
        logprobs=np.array([-np.log(len(WORDS)) + random.gauss(0.0, 0.3) for _ in tokens]),
        segments=[(0, len(tokens))],
        finish="stop" if ends else "length",
        text=" ".join(WORDS[token] for token in answer),
    )


def _verdict(random: Random, rollout: Rollout, seq: int) -> Scored:
    return scored_of(rollout, seq, Verdict("scored", random.random()))


def _batch(step: int, recipe: Recipe, verdicts: Sequence[Scored], groups: int) -> Batch:
    per_step = recipe.batch_samples
    of_step = verdicts[step * per_step : (step + 1) * per_step]
    return Batch(
        step=step,
        max_staleness=recipe.controller.max_staleness,
        group_ids=[verdict.group_id for verdict in of_step],
        indices=[verdict.index for verdict in of_step],
        rollout_seqs=[verdict.rollout_seq for verdict in of_step],
        rewards=[verdict.reward for verdict in of_step],
        next_group=groups,
        live_groups=list(range((step + 1) * recipe.controller.batch_groups, groups)),
    )
