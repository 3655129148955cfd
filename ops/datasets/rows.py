"""From what a file or a function holds to a row: a `prompt`, and beside it the task for the reward function."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from actors.reward import TESTS_MAX
from ops.datasets.bad_rows import BadRow
from ops.datasets.config import PROMPT_MARK, DataConfig
from ops.datasets.formats import FORMATS, Format, format_of, known
from schemas import PAYLOAD_BYTES_MAX, MalformedMessage, Prompt, UserError, encode

Row = dict[str, Any]
CountTokens = Callable[[Any], int]
"""Tokens of a prompt, as the model gets it. Raises `UserError`."""

ROW_BYTES_MAX = PAYLOAD_BYTES_MAX // 2
"""Of a row as a message; the other half is for the answer, which travels with it."""
_REMEDY = "A row is a map with a 'prompt', which is text or a list of {'role', 'content'}; or see data.format."


class RowReader:
    """Makes rows of raw ones, as a recipe's `data` section says; `count_tokens` is for `max_prompt_tokens`."""

    def __init__(self, config: DataConfig, format: Format, count_tokens: CountTokens | None = None) -> None:
        self._config = config
        self._count_tokens = count_tokens
        self.format = format

    def row(self, raw: Any) -> Row:
        """The row. Raises `BadRow` without a place, with what is missing or wrong."""
        return self.counted(raw)[0]

    def counted(self, raw: Any) -> tuple[Row, int]:
        """The row, and how many of its tests were left out for their size."""
        config = self._config
        columns = selected(raw, config.columns)
        if self.format.name == "rows" and not {"prompt", "messages"} & set(columns):
            raise BadRow(f"the row has no 'prompt', only {known(columns)}", _REMEDY)
        prompt, task = self.format.adapt(columns)
        _check_prompt(prompt)
        prompt = _dressed(prompt, config)
        fewer, left_out = _fewer_tests(task, config.tests_bytes_max)
        row = {"prompt": prompt, **fewer}
        try:
            _check_sendable(row)
        except BadRow:
            sendable = [test for test in _tests(task) if _can_be_sent(test)]
            if not sendable or len(sendable) == len(_tests(task)):
                raise
            fewer, left_out = _fewer_tests(task | {"tests": sendable}, config.tests_bytes_max)
            left_out += len(_tests(task)) - len(sendable)
            row = {"prompt": prompt, **fewer}
            _check_sendable(row)
        if config.max_prompt_tokens is not None and self._count_tokens is not None:
            try:
                tokens = self._count_tokens(row["prompt"])
            except BadRow:
                raise
            except UserError as error:
                raise BadRow(error.message.removesuffix("."), error.remedy or "") from None
            if tokens > config.max_prompt_tokens:
                raise BadRow(
                    f"the prompt has {tokens:,} tokens, more than {config.max_prompt_tokens:,}",
                    "Shorten it, or raise data.max_prompt_tokens.",
                )
        return row, left_out


def reader_for(config: DataConfig, first: Any, count_tokens: CountTokens | None = None) -> RowReader:
    """The reader for a source whose first raw row is `first`, in the format that the recipe names or the row shows."""
    if config.format != "auto":
        return RowReader(config, FORMATS[config.format], count_tokens)
    columns = selected(first, config.columns) if isinstance(first, Mapping) else None
    return RowReader(config, format_of(columns) or FORMATS["rows"], count_tokens)


def selected(raw: Any, columns: Mapping[str, str] | None) -> dict[str, Any]:
    """The columns that the recipe names, by our names; all, if it names none. Raises `BadRow`."""
    if not isinstance(raw, dict):
        raise BadRow(f"the row is {type(raw).__name__}, not a map", _REMEDY)
    if columns is None:
        return raw
    for ours, theirs in columns.items():
        if theirs not in raw:
            raise BadRow(
                f"the row has no {theirs!r}, which data.columns names for {ours!r}, only {known(raw)}",
                "Correct data.columns.",
            )
    return {ours: raw[theirs] for ours, theirs in columns.items()}


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, list):
        for number, message in enumerate(prompt):
            missing = [key for key in ("role", "content") if not isinstance(message, dict) or key not in message]
            if missing:
                raise BadRow(f"message {number} of the prompt has no '{missing[0]}'", _REMEDY)
            if not isinstance(message["role"], str):
                raise BadRow(f"the role of message {number} of the prompt is no text", _REMEDY)
    empty = not prompt or (isinstance(prompt, str) and not prompt.strip())
    if not isinstance(prompt, str | list) or empty:
        what = "empty" if isinstance(prompt, str | list) else type(prompt).__name__
        raise BadRow(f"the prompt is {what}, neither text nor a list of messages", _REMEDY)


def _dressed(prompt: Any, config: DataConfig) -> Any:
    """The prompt in the recipe's template, as a chat if the recipe wants one, behind its system message."""
    if config.template is not None:
        if isinstance(prompt, str):
            prompt = config.template.replace(PROMPT_MARK, prompt)
        elif isinstance(last := prompt[-1]["content"], str):
            prompt = [*prompt[:-1], prompt[-1] | {"content": config.template.replace(PROMPT_MARK, last)}]
    if isinstance(prompt, str) and (config.chat or config.system is not None):
        prompt = [{"role": "user", "content": prompt}]
    if config.system is not None and prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": config.system}, *prompt]
    return prompt


def _fewer_tests(task: dict[str, Any], bytes_max: int) -> tuple[dict[str, Any], int]:
    """The task with the tests that fit into `bytes_max` and that `code` takes; how many do not. Raises `BadRow`."""
    tests = _tests(task)
    if not tests:
        return task, 0
    kept: list[Any] = []
    left = bytes_max
    for test in tests:
        size = _size(test)
        if size <= left and len(kept) < TESTS_MAX:
            kept.append(test)
            left -= size
    if not kept:
        raise BadRow(f"none of its {len(tests)} tests fits into {bytes_max:,} bytes", "Raise data.tests_bytes_max.")
    return task | {"tests": kept}, len(tests) - len(kept)


def _tests(task: Mapping[str, Any]) -> list[Any]:
    tests = task.get("tests")
    return tests if isinstance(tests, list) else []


def _can_be_sent(test: Any) -> bool:
    """Whether a message can hold it: a call with a list of 100,000 numbers, or of 100 digits, cannot."""
    try:
        _check_sendable({"prompt": "-", "tests": [test]})
    except BadRow:
        return False
    return True


def _size(value: Any) -> int:
    """About the bytes of plain data on the wire."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_size, value)) + len(value)
    return 9


def _check_sendable(row: Row) -> None:
    """The message that will carry it knows what can be sent."""
    try:
        message = Prompt(group_id=0, index=0, group_size=1, prompt=row["prompt"], task=row, seed=0, min_version=0)
        if _size(row) > ROW_BYTES_MAX // 2 and len(encode(message)) > ROW_BYTES_MAX:
            raise BadRow(f"the row has more than {ROW_BYTES_MAX:,} bytes", "Leave out what the reward does not need.")
    except MalformedMessage as error:
        where = _not_finite(row)
        raise BadRow(
            f"{where} is no finite number" if where else error.reason,
            "Rows hold text, finite numbers, true, false, null, lists and maps; data.columns picks some of them.",
        ) from None


def _not_finite(value: Any, at: str = "") -> str | None:
    """Where in plain data a NaN or an infinity stands, as `'score'[2]`."""
    if isinstance(value, float) and not math.isfinite(value):
        return at
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        if found := _not_finite(item, f"{at}[{key!r}]" if at else repr(key)):
            return found
    return None
