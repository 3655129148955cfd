"""Bad rows: what is wrong with one and where, how many may be skipped, and what is told of them."""

import dataclasses
from collections.abc import Sequence

from schemas import UserError

SHOWN = 5  # bad rows that are told in full


class BadRow(UserError):
    """A row that cannot be used. `where` names its file and line, or row, or draw; `problem` is what is wrong."""

    def __init__(self, problem: str, remedy: str, where: str = "") -> None:
        super().__init__(f"{where}: {problem}." if where else f"{problem}.", remedy)
        self.problem = problem
        self.where = where

    def at(self, where: str) -> "BadRow":
        """The same, at a place."""
        return BadRow(self.problem, self.remedy, where)


@dataclasses.dataclass
class RowReport:
    """What a look at all rows of a source found. `bad` holds the first few bad rows as `where: problem`."""

    source: str
    format: str
    rows: int = 0
    """Rows that can be used."""
    bad_rows: int = 0
    bad: list[str] = dataclasses.field(default_factory=list)
    duplicates: int = 0
    tests_left_out: int = 0
    """Tests that did not fit into `data.tests_bytes_max`, over all rows."""

    def add(self, error: BadRow) -> None:
        """Count a bad row."""
        self.bad_rows += 1
        if len(self.bad) < SHOWN:
            self.bad.append(f"{error.where}: {error.problem}")

    def in_words(self, fate: str = " skipped") -> str:
        """`train.jsonl: 7,470 rows (gsm8k), 3 bad rows skipped`."""
        told = f"{self.source}: {self.rows:,} {_plural(self.rows, 'row')} ({self.format})"
        if self.bad_rows:
            told += f", {self.bad_rows:,} bad {_plural(self.bad_rows, 'row')}{fate}"
        if self.duplicates:
            told += f", {self.duplicates:,} {_plural(self.duplicates, 'duplicate')}"
        if self.tests_left_out:
            told += f", {self.tests_left_out:,} {_plural(self.tests_left_out, 'test')} left out for their size"
        return told

    def check(self, share_max: float) -> None:
        """Raises `UserError` if no row is left, or if more than `share_max` of all were skipped."""
        seen = self.rows + self.bad_rows
        if not self.bad_rows or (self.rows and self.bad_rows <= share_max * seen):
            return
        raise UserError(
            f"{self.source}: {self.bad_rows:,} of {seen:,} rows are bad; data.bad_rows_max lets {share_max:.0%} pass. "
            f"{listed(self.bad, self.bad_rows)}",
            "Mend the data, correct data.format or data.columns, or raise data.bad_rows_max.",
        )


def listed(bad: Sequence[str], count: int) -> str:
    """The first bad rows in one sentence each, and how many more there are."""
    more = f" And {count - len(bad):,} more." if count > len(bad) else ""
    return " ".join(f"{one}." for one in bad) + more


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
