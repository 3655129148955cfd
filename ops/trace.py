"""`rollstream trace`: one sample's life, or those of a group or of a step, told from the log."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from bus.table import BATCHES, PROMPTS
from ops.console import open_console, tell_damage
from ops.lives import Life, Sample, read_lives
from ops.log_source import LogSource, initial_model_of, open_log
from ops.replay.history import History, read_history
from ops.text import HfTokenizer
from ops.trace_view import Decoder, print_life, print_lives
from schemas import Batch, Prompt, UserError, parse_sample_id, sample_id
from schemas.trajectory import model_tokens

Target: TypeAlias = tuple[Literal["sample"], Sample] | tuple[Literal["group", "step"], int]

FORMS = "12-3 is sample 3 of group 12, 12 the whole group, step:7 all samples of step 7"


async def main(wanted: str, target: str | None, as_json: bool) -> int:
    """Tell the life of a sample, a group, or the samples of a step; always 0.

    Raises:
        UserError: the log holds no such thing.
    """
    asked = parse_target(wanted)
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(open_log(target))
        history = await read_history(source)
        lives = await lives_of(source, history, asked)
        tokenizer = _decoder_of(source, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "initial")
        if as_json:
            told = [to_json(life, tokenizer) for life in lives]
            print(json.dumps(told[0] if asked[0] == "sample" else told, indent=1))
            return 0
        console = open_console()
        if asked[0] == "sample":
            print_life(lives[0], tokenizer, console)
        else:
            print_lives(f"{asked[0]} {asked[1]}", lives, tokenizer, console)
        if isinstance(tokenizer, Ids):
            console.print(f"tokens are told by their ids: {tokenizer.reason}", style="yellow", markup=False)
        tell_damage(source.damage, console)
    return 0


class Ids:
    """Token ids in place of texts, for a recording without a model; `reason` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """`[" 17", " 4"]`."""
        return [f" {token}" for token in tokens]


def _decoder_of(source: LogSource, folder: Path) -> Decoder:
    try:
        initial = initial_model_of(source, folder)
    except UserError as error:
        return Ids(error.message)
    return HfTokenizer(str(initial))


def parse_target(text: str) -> Target:
    """What a person asks for: `12-3`, `12` or `step:7`. Raises `UserError`."""
    sample = parse_sample_id(text)
    if sample is not None:
        return "sample", sample
    name, _, number = text.rpartition(":")
    if number.isdecimal() and name in ("", "group"):
        return "group", int(number)
    if number.isdecimal() and name == "step":
        return "step", int(number)
    numbers = re.findall(r"\d+", text)
    near = {1: f"Did you mean {numbers[0]} or step:{numbers[0]}? " if numbers else "", 2: "Did you mean {}-{}? "}
    hint = near.get(len(numbers), "").format(*numbers)
    raise UserError(f"{text!r} names no sample.", f"{hint}{FORMS}.")


async def lives_of(source: LogSource, history: History, asked: Target) -> list[Life]:
    """The lives asked for, in order. Raises `UserError` if the log holds none of them."""
    size = history.recipe.controller.group_size
    if asked[0] == "sample":
        wanted = [asked[1]]
    elif asked[0] == "group":
        wanted = [(asked[1], index) for index in range(size)]
    else:
        wanted = await _of_step(source, asked[1])
    # A recipe of a step is known once the step is done; of one under way, take the newest.
    lives = await read_lives(
        source, lambda step: history.recipe_of(step) if step < history.steps else history.recipe, wanted
    )
    if not lives:
        raise await _unknown(source, asked, size)
    return [lives[sample] for sample in wanted if sample in lives]


async def _of_step(source: LogSource, step: int) -> list[Sample]:
    try:
        (entry,) = await source.get(BATCHES, [step + 1])  # batch i stands at sequence i + 1
    except LookupError:
        last = (await source.info(BATCHES)).last_seq
        raise UserError(f"{source.run} has no step {step}.", f"It has steps 0 to {last - 1}.") from None
    batch = entry.message()
    assert isinstance(batch, Batch)
    return list(zip(batch.group_ids.tolist(), batch.indices.tolist(), strict=True))


async def _unknown(source: LogSource, asked: Target, size: int) -> UserError:
    newest = -1
    last = (await source.info(PROMPTS)).last_seq
    with contextlib.suppress(LookupError):
        message = (await source.get(PROMPTS, [last]))[0].message()
        if isinstance(message, Prompt):
            newest = message.group_id
    known = f"The log of {source.run} holds groups 0 to {newest}, each with samples 0 to {size - 1}."
    if asked[0] == "sample":
        group, index = asked[1]
        hint = f" Did you mean {sample_id(group, size - 1)}?" if group <= newest and index >= size else ""
        return UserError(f"There is no sample {sample_id(group, index)}.", known + hint)
    return UserError(f"There is no group {asked[1]}.", known)


def to_json(life: Life, tokenizer: Decoder) -> dict[str, Any]:
    """All of it, as plain data: tokens, texts, versions, times, verdict, training, drop, dead letters."""
    out: dict[str, Any] = {"id": life.id, "group_id": life.group_id, "index": life.index, "fate": life.fate}
    for name in ("prompt", "partial", "rollout", "scored", "dropped"):
        message = getattr(life, name)
        out[name] = None if message is None else _plain(message)
    if life.rollout is not None:
        out["rollout"]["pieces"] = tokenizer.pieces(life.rollout.tokens.tolist())
        out["rollout"]["versions"] = [version for version, count in life.rollout.segments for _ in range(count)]
        out["rollout"]["made"] = model_tokens(life.rollout.observations, len(life.rollout.tokens)).tolist()
        out["rollout"]["seq"] = life.rollout_seq
    out["training"] = None if life.training is None else dataclasses.asdict(life.training)
    out["times"] = {
        "admitted": life.admitted_s,
        "prefix_kept": life.partial_s,
        "generated": life.rollout_s,
        "scored": life.scored_s,
        "batched": life.training.batched_s if life.training else None,
        "trained": life.training.trained_s if life.training else None,
        "dropped": life.dropped_s,
    }
    out["dead_letters"] = life.dead_letters
    out["again"] = life.again
    return out


def _plain(message: Any) -> dict[str, Any]:
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in fields.items()}
