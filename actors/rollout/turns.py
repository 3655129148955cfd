"""What a rollout worker is asked for and what it answers: whole samples, or single turns of episodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from actors.rollout.early_stop import Cut
from actors.rollout.engine import Generation, Sampling
from schemas import Answer, Partial, Prompt, Rollout, Turn, parse_sample_id


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """An answer that is finished. `text` is decoded; `resumed` counts the hand-overs, `saved` as in `Rollout`."""

    generation: Generation
    text: str
    worker: str
    seconds: float
    resumed: int
    cut: Cut | None
    saved: int


def name_of(message: Prompt | Turn) -> str:
    """By which the engine and the partials know it: the id of the sample, or of the turn."""
    return message.id if isinstance(message, Turn) else message.sample_id


def sampling_of(message: Prompt | Turn, recipe: Sampling) -> Sampling:
    """The recipe's sampling, with the bound that a turn sets itself."""
    if isinstance(message, Turn) and 0 < message.max_new_tokens < recipe.max_new_tokens:
        return dataclasses.replace(recipe, max_new_tokens=message.max_new_tokens)
    return recipe


def text_of(message: Prompt | Turn, text: str) -> str:
    """The text of an answer; that of a turn ends before the first string that ends it."""
    if isinstance(message, Turn):
        for string in message.stop:
            text = text.partition(string)[0]
    return text


def result_of(message: Prompt | Turn, made: Made) -> Rollout | Answer:
    """What is published of a finished answer."""
    generation = made.generation
    assert generation.finish is not None
    made_of: dict[str, Any] = {
        "group_id": message.group_id,
        "index": message.index,
        "tokens": np.array(generation.tokens, "<i4"),
        "logprobs": np.array(generation.logprobs, "<f4"),
        "segments": generation.segments,
        "finish": generation.finish,
        "text": made.text,
        "worker": made.worker,
        "seconds": made.seconds,
        "resumed": made.resumed,
        "stopped": made.cut.reason if made.cut is not None else "",
        "saved": made.saved,
    }
    if isinstance(message, Turn):
        return Answer(turn=message.id, **made_of)
    return Rollout(
        group_size=message.group_size,
        prompt=message.prompt,
        task=message.task,
        prompt_tokens=np.array(generation.prompt_tokens, "<i4"),
        **made_of,
    )


def refusal_of(turn: Turn, error: Exception, worker: str) -> Answer:
    """The answer to a turn that cannot be generated from."""
    return Answer(
        group_id=turn.group_id,
        index=turn.index,
        turn=turn.id,
        tokens=np.array((), "<i4"),
        logprobs=np.array((), "<f4"),
        segments=(),
        finish="length",
        text="",
        worker=worker,
        error=str(error)[:4000],
    )


def prefix_of(name: str, prompt_tokens: tuple[int, ...], partial: Partial) -> Generation:
    """The kept prefix of an answer, to go on from."""
    return Generation(
        sample_id=name,
        prompt_tokens=prompt_tokens,
        tokens=tuple(partial.tokens.tolist()),
        logprobs=tuple(partial.logprobs.tolist()),
        segments=partial.segments,
        finish=None,
    )


def partial_of(generation: Generation, worker: str) -> Partial:
    """The prefix of an unfinished answer."""
    sample, slash, _ = generation.sample_id.partition("/")
    parsed = parse_sample_id(sample)
    assert parsed is not None
    return Partial(
        group_id=parsed[0],
        index=parsed[1],
        tokens=np.array(generation.tokens, "<i4"),
        logprobs=np.array(generation.logprobs, "<f4"),
        segments=generation.segments,
        worker=worker,
        turn=generation.sample_id if slash else "",
    )
