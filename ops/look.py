"""`rollstream data`: the data of a recipe as a run would see it: rows, lengths, bad rows, examples. Trains nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ops.chart import bar
from ops.console import open_console
from ops.datasets import DataConfig, Dataset, FileRows, GeneratedRows, RowReport, load_dataset
from ops.datasets.bad_rows import SHOWN
from ops.datasets.rewards import check_reward, suggested
from ops.recipe import Recipe
from ops.text import HfTokenizer
from schemas import UserError

BINS = 10
TASK_CHARS_MAX = 400
PROMPT_CHARS_MAX = 2000


@dataclasses.dataclass(frozen=True)
class Example:
    """A row as the model and the reward function see it; `tokens` is None without a tokenizer."""

    prompt: str
    tokens: int | None
    task: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Look:
    """What was found out about the training data, or the held-out data.

    `lengths` are the prompt tokens of the draws looked at, empty without a tokenizer; `stops` says why a run would
    not start.
    """

    use: str
    report: RowReport
    draws: int
    lengths: list[int]
    examples: list[Example]
    hints: list[str]
    stops: str | None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


def look(recipe: Recipe, held_out: bool, count: int, examples: int, tokenizer: HfTokenizer | None) -> Look:
    """Look through the rows, and at the first `count` draws. Raises `UserError` if there is no row to look at."""
    config = recipe.data.model_copy(update={"on_bad_row": "skip", "bad_rows_max": 1.0})
    data = load_dataset(
        config,
        recipe.base,
        seed=recipe.seed,
        held_out=held_out,
        count_tokens=tokenizer.count if tokenizer is not None and config.max_prompt_tokens is not None else None,
        find_duplicates=True,
    )
    report, rows = _drawn(data, config, held_out, count)
    seen: list[Example] = []
    lengths: list[int] = []
    for row in rows:
        task = dict(row)
        prompt = task.pop("prompt")
        if tokenizer is None:
            shown, tokens = _plain(prompt), None
        else:
            ids = tokenizer.encode_prompt(prompt)
            lengths.append(len(ids))
            shown, tokens = tokenizer.text_of(ids) if len(seen) < examples else "", len(ids)
        if len(seen) < examples:
            seen.append(Example(shown, tokens, task))
    return Look(
        "held out" if held_out else "training",
        report,
        len(rows),
        lengths,
        seen,
        list(_hints(recipe, rows[0], report.format, tokenizer)),
        _stops(recipe, rows[0], report),
    )


def _drawn(data: Dataset, config: DataConfig, held_out: bool, count: int) -> tuple[RowReport, list[dict[str, Any]]]:
    """The report on the data, and its first draws."""
    if isinstance(data, FileRows):
        return data.report, [data.row(k) for k in range(min(count, len(data)))]
    assert isinstance(data, GeneratedRows)
    report = RowReport((config.eval or config.train) if held_out else config.train, data.format)
    rows, seen = [], set()
    for k in range(count):
        row, bad = data.attempt(k)
        for error in bad:
            report.add(error)
        rows.append(row)
        seen.add(json.dumps(row, sort_keys=True))
    report.rows = len(rows)
    report.duplicates = len(rows) - len(seen)
    return report, rows


def _hints(recipe: Recipe, row: dict[str, Any], format: str, tokenizer: HfTokenizer | None) -> Iterator[str]:
    if tokenizer is not None and tokenizer.has_chat_template and isinstance(row["prompt"], str):
        yield (
            "The model has a chat template, but the prompts are bare text. "
            "data.chat: true puts them as a user's messages."
        )
    fitting, function = suggested(row, format), recipe.reward.function
    if fitting is not None and function != fitting and ":" not in function:
        yield f"These rows are made for the reward function {fitting}; the recipe has {function}."


def _stops(recipe: Recipe, row: dict[str, Any], report: RowReport) -> str | None:
    """Why a run with this recipe would not start, None if it would."""
    try:
        if report.bad_rows and recipe.data.on_bad_row == "stop":
            return "data.on_bad_row is stop: a run would stop at the first bad row."
        report.check(recipe.data.bad_rows_max)
        if report.duplicates and recipe.data.on_duplicate == "stop":
            return "data.on_duplicate is stop: a run would stop at the first duplicate."
        check_reward(recipe.reward.function, row, report.format)
    except UserError as error:
        return f"A run would stop. {error.message} {error.remedy}"
    return None


def _plain(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"[{message['role']}] {message['content']}" for message in prompt)


@contextlib.contextmanager
def recipe_tokenizer(recipe: Recipe) -> Iterator[HfTokenizer]:
    """The tokenizer that a run would have; a model that is made is made for it and removed. Raises `UserError`."""
    with tempfile.TemporaryDirectory(prefix="rollstream-") as made:
        with contextlib.redirect_stdout(sys.stderr):  # some packages greet, when they are imported
            from transformers.utils import logging

            from ops.models import prepare_model
            from ops.prepare import tokenizer_of

            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            tokenizer = tokenizer_of(recipe, prepare_model(recipe.model, recipe.base, Path(made), recipe.seed))
        yield tokenizer


def main(recipe: Recipe, held_out: bool, count: int, examples: int, tokens: bool, as_json: bool) -> int:
    """Tell what the data is. 1 if a run would stop because of it."""
    with contextlib.ExitStack() as stack:
        tokenizer = stack.enter_context(recipe_tokenizer(recipe)) if tokens else None
        uses = [False, True] if held_out and recipe.data.eval is not None else [False]
        looks = [look(recipe, use, count, examples, tokenizer) for use in uses]
    if as_json:
        print(json.dumps([one.to_json() for one in looks], ensure_ascii=False))
    else:
        console = open_console()
        for number, one in enumerate(looks):
            if number:
                console.print()
            show(one, recipe.data, console)
    return int(any(one.stops for one in looks))


def show(found: Look, config: DataConfig, console: Console) -> None:
    """Print it."""
    report = found.report
    fate = " skipped" if config.on_bad_row == "skip" else ""
    console.print(Text(f"{found.use}: {report.in_words(fate)}", "bold"))
    for sentence in report.bad:
        console.print(Padding(Text(sentence, "yellow"), (0, 0, 0, 2)))
    if report.bad_rows > SHOWN:
        console.print(Text(f"  and {report.bad_rows - SHOWN:,} more", "yellow"))
    if found.lengths:
        _show_lengths(found, console)
    for number, example in enumerate(found.examples):
        tokens = "" if example.tokens is None else f", {example.tokens:,} tokens"
        console.print(Text(f"\nexample {number + 1}{tokens}: the prompt", "bold"))
        console.print(Text(_cut(example.prompt, PROMPT_CHARS_MAX), "cyan"))
        console.print(Text("for the reward function", "bold"))
        console.print(Text(_cut(json.dumps(example.task, ensure_ascii=False), TASK_CHARS_MAX)))
    for hint in found.hints:
        console.print(Text(f"\nhint: {hint}", "yellow"))
    if found.stops:
        console.print(Text(f"\n{found.stops}", "bold red"))


def _show_lengths(found: Look, console: Console) -> None:
    lengths = sorted(found.lengths)
    mean = sum(lengths) / len(lengths)
    middle, high = lengths[len(lengths) // 2], lengths[min(len(lengths) - 1, len(lengths) * 95 // 100)]
    of = f" of {len(lengths):,} draws" if len(lengths) < found.report.rows or found.draws != found.report.rows else ""
    console.print(
        Text(f"prompt tokens{of}: mean {mean:,.0f}, median {middle:,}, 95 % {high:,}, longest {lengths[-1]:,}")
    )
    bins = histogram(lengths)
    labels = [f"{low:,}" if low == high else f"{low:,} – {high:,}" for low, high, _ in bins]
    width, most = max(map(len, labels)), max(count for _, _, count in bins)
    room = max(8, min(60, console.width - width - 14))
    for label, (_, _, count) in zip(labels, bins, strict=True):
        console.print(Text(f"  {label:>{width}}  {bar(count / most, room)} {count:,}", no_wrap=True))


def histogram(lengths: list[int]) -> list[tuple[int, int, int]]:
    """At most `BINS` ranges of equal width as (least, most, how many); together they hold all lengths."""
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // BINS)
    counts = [0] * -(-(high - low + 1) // width)
    for length in lengths:
        counts[(length - low) // width] += 1
    return [
        (low + number * width, min(high, low + (number + 1) * width - 1), count) for number, count in enumerate(counts)
    ]


def _cut(text: str, chars_max: int) -> str:
    """In the middle, since an end tells how the prompt leads to the answer."""
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
