"""The data of a recipe, opened: files are looked through once, then read row by row; functions are called by the draw.

Every draw can be made by its number alone, so a controller that restarts goes on at the exact next one.
"""

import json
from array import array
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Protocol

from actors.functions import load_function
from ops.datasets.arrow import ArrowRows
from ops.datasets.bad_rows import BadRow, RowReport
from ops.datasets.config import FILE_ENDINGS, GYM, DataConfig, names_files, split_of
from ops.datasets.files import Joined, JsonLines, Source
from ops.datasets.folders import files_of
from ops.datasets.formats import FORMATS
from ops.datasets.rows import CountTokens, Row, RowReader, reader_for
from schemas import UserError

ATTEMPTS_MAX = 100  # of a function whose bad rows are skipped, for one draw


class Dataset(Protocol):
    """Rows by the number of the draw; the same number gives the same row, whatever was drawn before."""

    @property
    def format(self) -> str:
        """The name of the rows' format."""
        ...

    def row(self, k: int) -> Row:
        """The row of draw `k`, counted from 0, without end. Raises `UserError`."""
        ...


def load_dataset(
    config: DataConfig,
    base: Path,
    *,
    seed: int = 0,
    held_out: bool = False,
    count_tokens: CountTokens | None = None,
    find_duplicates: bool = False,
    most: int | None = None,
) -> Dataset:
    """The training data of a recipe in the folder `base`, or what it is evaluated on if `held_out`.

    `held_out` takes a function's draws from a space of seeds that training does not use, and files as they are,
    unshuffled. `count_tokens` is needed for `max_prompt_tokens`, which is not looked at without it. With
    `find_duplicates` they are counted though they are kept. With `most` a file is looked through only until so many
    rows are found, and has no others.
    Raises `UserError` for a file or function that does not exist, for a bad row unless they are skipped, and for too
    many of them.
    """
    spec = (config.eval or config.train) if held_out else config.train
    if not names_files(spec):
        reader = RowReader(config, FORMATS["rows" if config.format == "auto" else config.format], count_tokens)
        if spec.startswith(GYM):
            from ops.datasets.gym import gym_row

            return GeneratedRows(spec, gym_row(spec, config.options), reader, seed, held_out, config.on_bad_row)
        return GeneratedRows(spec, load_function(spec, base), reader, seed, held_out, config.on_bad_row)
    source = open_source(spec, base, held_out and config.eval is not None)
    shuffle = config.shuffle and not held_out
    return FileRows(source, config, spec, seed, shuffle, count_tokens, find_duplicates, most)


def open_source(spec: str, base: Path, held_out: bool) -> Source:
    """The raw rows of a file or a folder. Raises `UserError`."""
    name, split = split_of(spec)
    path = base / Path(name).expanduser()
    if path.is_dir():
        return Joined([_open_file(file) for file in files_of(path, split, held_out)])
    if not path.name.endswith(FILE_ENDINGS):
        raise UserError(
            f"The data '{spec}' is neither a folder, nor a file that ends with {', '.join(FILE_ENDINGS)}, "
            "nor a function.",
            "Correct the path, which is relative to the recipe's folder, or write 'path/to/file.py:function'.",
        )
    if not path.is_file():
        raise UserError(f"The data file {path} does not exist.", "Give a path relative to the recipe's folder.")
    if split is not None:
        raise UserError(f"The data file {path} has no splits, but '{spec}' names one.", f"Remove '#{split}'.")
    return _open_file(path)


def _open_file(path: Path) -> Source:
    return ArrowRows(path) if path.suffix in (".parquet", ".arrow") else JsonLines(path)


class FileRows:
    """The rows of a file, over and over; shuffled, each epoch in an order that follows from seed and epoch alone.

    In memory are only the places of the rows, 24 bytes each, and the order of two epochs.
    """

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        name: str,
        seed: int = 0,
        shuffle: bool = True,
        count_tokens: CountTokens | None = None,
        find_duplicates: bool = False,
        most: int | None = None,
    ) -> None:
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._shuffled)  # draws go through one epoch after the other
        self._reader = reader_for(config, _first(source), count_tokens)
        self.report = RowReport(name, self._reader.format.name)
        self._good = self._look_through(config, find_duplicates or config.on_duplicate != "keep", most)

    @property
    def format(self) -> str:
        """The name of the rows' format."""
        return self.report.format

    def __len__(self) -> int:
        return len(self._good)

    def row(self, k: int) -> Row:
        """Draw `k`: row `k mod n` of epoch `k div n`."""
        epoch, position = divmod(k, len(self._good))
        return self._read(self._good[self._order(epoch)[position] if self._shuffle else position])[0]

    def _read(self, number: int) -> tuple[Row, int]:
        try:
            return self._reader.counted(self._source.read(number))
        except BadRow as error:
            raise error.at(self._source.where(number)) from None

    def _look_through(self, config: DataConfig, find_duplicates: bool, most: int | None) -> "array[int]":
        """The numbers of the rows that can be used. Raises `UserError`."""
        good = array("q")
        seen: dict[bytes, int] = {}
        for number in range(len(self._source)):
            if len(good) == most:
                break
            try:
                row, left_out = self._read(number)
                first = self._same(row, number, seen) if find_duplicates else None
                if first is not None:
                    self.report.duplicates += 1
                    if config.on_duplicate == "stop":
                        raise BadRow(
                            f"the row equals that of {self._source.where(first)}",
                            "Remove one of them, or set data.on_duplicate to skip or keep.",
                            self._source.where(number),
                        )
                    if config.on_duplicate == "skip":
                        continue
            except BadRow as error:
                if config.on_bad_row == "stop":
                    raise
                self.report.add(error)
                continue
            self.report.tests_left_out += left_out
            good.append(number)
        self.report.rows = len(good)
        if most is None or not good:
            self.report.check(config.bad_rows_max)
        if not good:
            raise UserError(
                f"The data {self.report.source} has no rows.", "It must hold at least one row with a 'prompt'."
            )
        return good

    def _same(self, row: Row, number: int, seen: dict[bytes, int]) -> int | None:
        """The number of the earlier row that equals this one."""
        text = json.dumps(row, sort_keys=True)
        first = seen.setdefault(blake2b(text.encode(), digest_size=8).digest(), number)
        if first == number or json.dumps(self._read(first)[0], sort_keys=True) != text:
            return None
        return first

    def _shuffled(self, epoch: int) -> "array[int]":
        order = array("q", range(len(self._good)))
        Random(f"order/{self._seed}/{epoch}").shuffle(order)
        return order


def _first(source: Source) -> Any:
    """The first raw row that can be read."""
    for number in range(len(source)):
        try:
            return source.read(number)
        except BadRow:
            continue
    return None


class GeneratedRows:
    """Rows that a function makes, each from a generator of its own, seeded by seed, use and number of the draw."""

    def __init__(
        self,
        spec: str,
        function: Callable[[Random], Any],
        reader: RowReader,
        seed: int,
        held_out: bool,
        on_bad_row: str = "stop",
    ) -> None:
        self._function = function
        self._reader = reader
        self._spec = spec
        self._space = f"{'held-out' if held_out else 'train'}/{seed}"
        self._attempts = ATTEMPTS_MAX if on_bad_row == "skip" else 1

    @property
    def format(self) -> str:
        """The name of the rows' format."""
        return self._reader.format.name

    def row(self, k: int) -> Row:
        """Draw `k`. Raises `UserError` if what the function makes is no row.

        Where bad rows are skipped, the draw is repeated with other seeds, always the same ones.
        """
        return self.attempt(k)[0]

    def attempt(self, k: int) -> tuple[Row, list[BadRow]]:
        """Draw `k`, and the bad rows that were skipped for it."""
        bad: list[BadRow] = []
        for number in range(self._attempts):
            again = f"/{number}" if number else ""
            where = f"'{self._spec}', draw {k}"
            try:
                return self._reader.row(self._function(Random(f"{self._space}/{k}{again}"))), bad
            except BadRow as error:
                bad.append(error.at(where))
        if self._attempts == 1:
            raise bad[0]
        raise UserError(f"{bad[0].message} So were {self._attempts} rows in a row.", bad[0].remedy)
