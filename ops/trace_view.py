"""Lives of samples in a terminal: every token in the colour of the weights that made it, or of what was told."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ops.lives import Life
from ops.runs import Run, runs_of
from ops.text import visible
from schemas import Partial, Rollout, Segments, oldest_and_newest
from schemas.trajectory import model_tokens, turn_ends

COLOURS: Final = ("cyan", "yellow", "magenta", "green", "blue", "bright_red")
MASKED: Final = "strike dim"  # too old to be trained
TOLD: Final = "italic bright_black"  # by a user or a tool, between the model's turns
TOLD_MARKS: Final = ("⟨", "⟩")
COLUMNS: Final = ("sample", "tokens", "versions", "worker", "reward", "advantage", "age", "fate")
DISPENSABLE: Final = ("worker", "versions", "fate", "age")  # in a narrow terminal, in this order
NUMERIC: Final = ("tokens", "reward", "advantage", "age")
PROMPT_CHARS_MAX = 2000
ANSWER_WIDTH_MIN = 24
WIDE = 1000
INDENT = 2


class Decoder(Protocol):
    """What tells tokens as text; `ops.text.HfTokenizer` is it."""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds where it stands."""


def print_life(life: Life, tokenizer: Decoder, console: Console) -> None:
    """All about one sample."""
    console.print(Text.assemble((life.id, "bold"), "  ", _fate(life)))
    _section(console, "prompt", _prompt(life))
    if life.rollout is not None:
        _section(console, "answer", _answer(life, tokenizer))
        console.print(Padding(_legend(life), (0, 0, 0, INDENT), expand=False))
        if life.rollout.messages:
            _section(console, "messages", _messages(life.rollout.messages))
    elif life.partial is not None:
        pieces = tokenizer.pieces(life.partial.tokens.tolist())
        _section(console, "answer so far", coloured(pieces, _runs(life.partial)))
    _section(console, "life", _times(life))
    facts = _facts(life)
    if facts.row_count:
        _section(console, "outcome", facts)
    for letter in life.dead_letters:
        console.print(f"dead letter from {visible(letter)}", style="red", markup=False, soft_wrap=True)
    for what in life.again:
        console.print(f"came a second time: {what}; readers drop it", style="dim", markup=False, soft_wrap=True)


def print_lives(title: str, lives: Sequence[Life], tokenizer: Decoder, console: Console) -> None:
    """A line for each of several samples."""
    console.print(Text(f"{title}: {len(lives)} samples", "bold"))
    rows = [dict(zip(COLUMNS, _row(life), strict=True)) for life in lives]
    columns = list(COLUMNS)
    for name in (*DISPENSABLE, ""):
        table = _table(columns, [tuple(row[column] for column in columns) for row in rows])
        room = console.width - 2 - Measurement.get(console, console.options.update(width=WIDE), table).maximum
        if room >= ANSWER_WIDTH_MIN or not name:
            break
        columns.remove(name)
    answers = [_short_answer(life, tokenizer, max(ANSWER_WIDTH_MIN, room)) for life in lives]
    full = [(*(row[column] for column in columns), answer) for row, answer in zip(rows, answers, strict=True)]
    console.print(_table((*columns, "answer"), full))
    rewards = [life.scored.reward for life in lives if life.scored is not None and life.scored.reward is not None]
    if rewards:
        mean = sum(rewards) / len(rewards)
        console.print(f"mean reward {mean:.3f}; one of them is told by: rollstream trace {lives[0].id}")


def _table(headings: Sequence[str], rows: Sequence[tuple[str | Text, ...]]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in NUMERIC else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _row(life: Life) -> tuple[str | Text, ...]:
    rollout, scored, training = life.rollout, life.scored, life.training
    age = ""
    if training is not None:
        age = str(max(training.staleness, default=0))
        age += f" ({training.masked} masked)" if training.masked else ""
    return (
        life.id,
        str(_made(rollout).sum()) if rollout is not None else "",
        _versions(rollout.segments) if rollout is not None else "",
        rollout.worker if rollout is not None else "",
        "" if scored is None else scored.verdict if scored.reward is None else _number(scored.reward),
        _advantage(training.advantages, 3) if training is not None else "",
        age,
        _fate(life),
    )


def _short_answer(life: Life, tokenizer: Decoder, room: int) -> Text:
    if life.rollout is None:
        return Text()
    pieces = tokenizer.pieces(life.rollout.tokens.tolist()[:room])
    text = coloured(pieces, _runs(life.rollout), one_line=True)
    text.truncate(room, overflow="ellipsis")
    return text


def coloured(pieces: Sequence[str], runs: Sequence[Run], oldest: int = 0, one_line: bool = False) -> Text:
    """The answer, each token in the colour of its version; those of versions before `oldest` are masked.

    Where the version changes a mark says to which, what was told stands in brackets, and a mark says where another
    sequence begins: so it can be read without colours, too.
    """
    text = Text()
    colours = _colours(runs)
    before: Run | None = None
    made_by = None  # the version of the run before that was not told
    for run in runs:
        if before is not None and run.sequence != before.sequence:
            text.append(" " if one_line else "\n")
            text.append(f"sequence {run.sequence + 1}▸", "reverse")
            text.append(" ")
        of_run = pieces[run.start : run.start + run.count]
        if not run.told and len(colours) > 1 and run.version != made_by:
            text.append("" if not text else " ")
            text.append(f"v{run.version}▸", f"reverse {colours[run.version]}")
            text.append(" " if of_run and not of_run[0].startswith(" ") else "")
        style = TOLD if run.told else colours[run.version] + (f" {MASKED}" if run.version < oldest else "")
        opened, closed = TOLD_MARKS if run.told else ("", "")
        text.append(opened, style)
        for piece in of_run:
            shown = visible(piece)
            text.append(shown if one_line else shown.replace("↵", "↵\n"), style)
        text.append(closed, style)
        before, made_by = run, made_by if run.told else run.version
    return text


def _runs(message: Rollout | Partial) -> list[Run]:
    if isinstance(message, Rollout):
        return runs_of(message.segments, message.observations, message.sequences)
    return runs_of(message.segments, np.zeros(0, np.int32), np.zeros(0, np.int32))


def _made(rollout: Rollout) -> Any:
    """bool [T]."""
    return model_tokens(rollout.observations, len(rollout.tokens))


def _colours(runs: Sequence[Run]) -> dict[int, str]:
    versions = sorted({run.version for run in runs if not run.told})
    return {version: COLOURS[place % len(COLOURS)] for place, version in enumerate(versions)}


def _messages(messages: Sequence[dict[str, Any]]) -> Text:
    """A line for each: who said what."""
    text = Text()
    for message in messages:
        content = message.get("content")
        rest = {key: value for key, value in message.items() if key not in ("role", "content") and value}
        told = content if isinstance(content, str) else "" if content is None else json.dumps(content)
        told += f" {json.dumps(rest)}" if rest else ""
        text.append("\n" if text else "")
        text.append(f"{visible(str(message.get('role', '?')))}: ", "bold")
        text.append(visible(told[:PROMPT_CHARS_MAX]) + ("…" if len(told) > PROMPT_CHARS_MAX else ""))
    return text


def _section(console: Console, title: str, content: Any) -> None:
    console.print(Text(f"\n{title}", "dim"))
    console.print(Padding(content, (0, 0, 0, INDENT), expand=False))


def _fate(life: Life) -> Text:
    style = "green" if life.training is not None else "red" if life.dropped is not None else "yellow"
    return Text(life.fate, style)


def _prompt(life: Life) -> Text:
    message = life.prompt or life.rollout
    assert message is not None  # a life is known by either
    if isinstance(message.prompt, str):
        told = message.prompt
    else:
        told = "\n".join(f"{turn.get('role', '?')}: {turn.get('content', '')}" for turn in message.prompt)
    lines = told[:PROMPT_CHARS_MAX].splitlines()
    text = Text("\n".join(map(visible, lines)) + ("…" if len(told) > PROMPT_CHARS_MAX else ""))
    if message.task:
        row = ", ".join(f"{key} {value!r}" for key, value in message.task.items())
        text.append(f"\n{visible(row[:PROMPT_CHARS_MAX])}", "dim")
    return text


def _answer(life: Life, tokenizer: Decoder) -> Text:
    assert life.rollout is not None
    training = life.training
    oldest = 0 if training is None else training.step - training.max_staleness
    pieces = tokenizer.pieces(life.rollout.tokens.tolist())
    text = coloured(pieces, _runs(life.rollout), oldest)
    if life.rollout.finish == "length":
        text.append(" … cut at its token limit", "dim")
    return text


def _legend(life: Life) -> Text:
    assert life.rollout is not None
    text, training = Text(), life.training
    runs = _runs(life.rollout)
    told = sum(run.count for run in runs if run.told)
    for version, colour in _colours(runs).items():
        count = sum(run.count for run in runs if run.version == version and not run.told)
        text.append("■ ", colour)
        text.append(f"version {version}: {_tokens(count)}")
        if training is not None:
            age = training.step - version
            old = "on-policy" if age == 0 else f"{age} version{'s' if age > 1 else ''} old"
            text.append(f", {old}{', masked' if age > training.max_staleness else ''}")
        text.append("   ")
    if told:
        text.append("■ ", TOLD)
        text.append(f"told: {_tokens(told)}, never trained")
    return text


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"


def _times(life: Life) -> Table:
    """What happened when, and how long after what came before."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for style in (None, "dim", None):
        table.add_column(style=style, no_wrap=style is not None)
    rollout, scored, training = life.rollout, life.scored, life.training
    rows: list[tuple[float, str, str]] = []
    if life.admitted_s is not None and life.prompt is not None:
        rows.append((life.admitted_s, "admitted", f"asked of version {life.prompt.min_version} or newer"))
    if life.partial is not None and life.partial_s is not None:
        kept = f"the first {len(life.partial.tokens)} tokens"
        rows.append((life.partial_s, "prefix kept", f"{kept}, by {life.partial.worker or 'a worker'}"))
    if rollout is not None and life.rollout_s is not None:
        what = f"by {rollout.worker or 'a worker'}, {_duration(rollout.seconds)} there"
        if rollout.resumed:
            what += f"; handed over {rollout.resumed} time{'s' if rollout.resumed > 1 else ''} before"
        rows.append((life.rollout_s, "generated", what))
    if scored is not None and life.scored_s is not None:
        rows.append((life.scored_s, "scored", f"by {scored.worker or 'a worker'}, {_duration(scored.seconds)} there"))
    if training is not None:
        rows.append((training.batched_s, "batched", f"for step {training.step}"))
        if training.trained_s is not None:
            rows.append((training.trained_s, "trained", f"version {training.version} was announced"))
    if life.dropped is not None and life.dropped_s is not None:
        detail = f": {visible(life.dropped.detail)}" if life.dropped.detail else ""
        rows.append((life.dropped_s, "dropped", f"{life.dropped.reason}, cost {life.dropped.tokens} tokens{detail}"))
    before: float | None = None
    for time_s, what, how in sorted(rows, key=lambda row: row[0]):
        when = _clock(time_s) if before is None else f"+{_duration(time_s - before)}"
        table.add_row(what, when, how)
        before = time_s
    if len(rows) > 1:
        first, last = min(row[0] for row in rows), max(row[0] for row in rows)
        table.add_row("in all", _duration(last - first), "")
    return table


def _facts(life: Life) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    if life.scored is not None:
        scored = life.scored
        told = scored.verdict if scored.reward is None else _number(scored.reward)
        parts = ", ".join(f"{name} {_number(value)}" for name, value in scored.parts.items())
        table.add_row(
            "reward", told + (f" ({parts})" if parts else "") + (f": {scored.detail}" if scored.detail else "")
        )
        if scored.reward_digest:
            table.add_row("reward function", scored.reward_digest)
    if life.training is not None:
        training = life.training
        group = " ".join(_number(reward) for reward in training.group_rewards)
        advantage = _advantage(training.advantages, 4) or "decided by more than the batch; not computed here"
        table.add_row("advantage", f"{advantage}; rewards of group {life.group_id}: {group}")
        bound = f"η = {training.max_staleness}"
        worst = max(training.staleness, default=0)
        masked = f"{training.masked} tokens masked" if training.masked else "no token masked"
        table.add_row("staleness", f"{worst} at most, bound {bound}, {masked}")
    if life.rollout is not None and len(life.rollout.logprobs):
        made = _made(life.rollout)
        logprobs = life.rollout.logprobs[made]
        table.add_row("log-probability", f"mean {logprobs.mean():.3f}, least {logprobs.min():.3f} nats a token")
        table.add_row("tokens", f"{len(logprobs)} after {len(life.rollout.prompt_tokens)} of the prompt")
        turns = len(turn_ends(made, life.rollout.sequences))
        if turns > 1 or not made.all():
            sequences = max(1, len(life.rollout.sequences) // 2)
            table.add_row(
                "turns",
                f"{turns} in {sequences} sequence{'s' if sequences > 1 else ''}; told between them "
                f"{_tokens(int((~made).sum()))}",
            )
    return table


def _advantage(of_tokens: Sequence[float] | None, digits: int) -> str:
    """One number if all tokens have the same, else its range."""
    if of_tokens is None:
        return ""
    if not of_tokens:
        return "no token trained"
    low, high = min(of_tokens), max(of_tokens)
    alike = high - low < 0.5 * 10.0**-digits
    return f"{low:+.{digits}f}" if alike else f"{low:+.{digits}f} to {high:+.{digits}f}"


def _versions(segments: Segments) -> str:
    oldest_newest = oldest_and_newest(segments)
    if oldest_newest is None:
        return ""
    oldest, newest = oldest_newest
    return str(oldest) if oldest == newest else f"{oldest}–{newest}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s)) + f".{int(time_s % 1 * 1000):03d}"


def _duration(seconds: float) -> str:
    if abs(seconds) < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.2f} s" if abs(seconds) < 120 else f"{seconds / 60:.1f} min"
