"""Where prompts come from: JSONL, Parquet, or a function. Every draw can be made by its number alone.

A row is a map of plain data with a `prompt`: text, or chat messages `[{"role": "user", "content": "2+3="}]`. Whatever
else the row holds travels with the sample as its task, for the reward function: `{"prompt": "2+3=", "answer": "5"}`.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Protocol

from pydantic import Field

from actors.functions import load_function
from schemas import Config, MalformedMessage, Prompt, UserError

Row = dict[str, Any]


class DataConfig(Config):
    """The recipe's `data` section.

    `train` and `eval` are each a JSONL or Parquet file, relative to the recipe's folder, or a function
    `path/to/file.py:function` or `package.module:function` that makes a row from a `random.Random`. If `eval` is left
    out, the training data serves for evaluation: a function with draws that training never makes, a file as it is.
    """

    train: str = Field(min_length=1)
    eval: str | None = None
    shuffle: bool = True
    """Whether a training file is read in a new order in each epoch. Evaluation files are read as they are."""


class Dataset(Protocol):
    """Rows by the number of the draw; the same number gives the same row, whatever was drawn before."""

    def row(self, k: int) -> Row:
        """The row of draw `k`, counted from 0, without end."""
        ...


def load_dataset(spec: str, base: Path, *, seed: int = 0, shuffle: bool = True, held_out: bool = False) -> Dataset:
    """The data that `spec` names: a `.jsonl` or `.parquet` file, or a function.

    `held_out` takes a function's draws from a space of seeds that training does not use; of a file it changes nothing.
    Raises `UserError` for a file or function that does not exist, and for the first row that is none, with its place.
    """
    path = base / Path(spec).expanduser()
    if path.suffix in _READERS:
        if not path.is_file():
            raise UserError(f"The data file {path} does not exist.", "Give a path relative to the recipe's folder.")
        rows = [_checked(row, where) for where, row in _READERS[path.suffix](path)]
        if not rows:
            raise UserError(f"The data file {path} has no rows.", "It must hold at least one row with a 'prompt'.")
        return FileRows(rows, seed, shuffle)
    if ":" not in spec:
        raise UserError(
            f"The data '{spec}' is neither a .jsonl or .parquet file nor a function.",
            "Write a path that ends so, or 'path/to/file.py:function'.",
        )
    return GeneratedRows(spec, load_function(spec, base), seed, held_out)


class FileRows:
    """The rows of a file, over and over; shuffled, each epoch in an order that follows from seed and epoch alone."""

    def __init__(self, rows: list[Row], seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._shuffled)  # draws go through one epoch after the other

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, k: int) -> Row:
        """Draw `k`: row `k mod n` of epoch `k div n`."""
        epoch, position = divmod(k, len(self._rows))
        return self._rows[self._order(epoch)[position] if self._shuffle else position]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        Random(f"order/{self._seed}/{epoch}").shuffle(order)
        return order


class GeneratedRows:
    """Rows that a function makes, each from a generator of its own, seeded by seed, use and number of the draw."""

    def __init__(self, spec: str, function: Callable[[Random], Row], seed: int, held_out: bool) -> None:
        self._function = function
        self._spec = spec
        self._space = f"{'held-out' if held_out else 'train'}/{seed}"

    def row(self, k: int) -> Row:
        """Draw `k`. Raises `UserError` if what the function makes is no row."""
        return _checked(self._function(Random(f"{self._space}/{k}")), f"'{self._spec}', draw {k}")


def _checked(row: Any, where: str) -> Row:
    """`row`, if it is one. Raises `UserError` with the place, and what is missing or wrong."""
    remedy = "A row is a map with a 'prompt', which is text or a list of {'role', 'content'}."
    if not isinstance(row, dict):
        raise UserError(f"{where}: the row is {type(row).__name__}, not a map.", remedy)
    if "prompt" not in row:
        raise UserError(f"{where}: the row has no 'prompt', only {', '.join(map(str, row)) or 'nothing'}.", remedy)
    prompt = row["prompt"]
    if isinstance(prompt, list):
        for number, message in enumerate(prompt):
            missing = [key for key in ("role", "content") if not isinstance(message, dict) or key not in message]
            if missing:
                raise UserError(f"{where}: message {number} of the prompt has no '{missing[0]}'.", remedy)
    if not isinstance(prompt, str | list) or not prompt:
        what = "empty" if prompt in ("", []) else type(prompt).__name__
        raise UserError(f"{where}: the prompt is {what}, neither text nor a list of messages.", remedy)
    try:  # the message that will carry it knows what can be sent
        Prompt(group_id=0, index=0, group_size=1, prompt=prompt, task=row, seed=0, min_version=0)
    except MalformedMessage as error:
        raise UserError(
            f"{where}: {error.reason}.", "Rows hold text, finite numbers, true, false, null, lists and maps."
        ) from error
    return row


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:  # decoded one by one, so that a wrong byte is told with its line
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                try:  # "-sig": some editors begin a file with a byte order mark
                    yield where, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except UnicodeDecodeError as error:
                    raise UserError(f"{where}: this is no UTF-8: {error}.", "Save the file as UTF-8.") from error
                except ValueError as error:
                    raise UserError(f"{where}: this is no JSON: {error}.", "Write one JSON object a line.") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(
            f"Reading {path} needs the package pyarrow, which is not installed.",
            "Run: pip install 'rollstream[parquet]'.",
        ) from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {error}.", "Write the file anew.") from error
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row


_READERS: dict[str, Callable[[Path], Iterable[tuple[str, Any]]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
