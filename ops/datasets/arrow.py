"""Parquet and Arrow files by row. Arrow files are memory-mapped; of Parquet such a file is made, while it is read.

Parquet can be read only by pages of many rows: a shuffled order would decode thousands of rows for each that it takes.
"""

import datetime
import decimal
from array import array
from bisect import bisect_right
from pathlib import Path
from typing import Any

from ops.datasets.files import temporary_file, unreadable
from schemas import UserError

BATCH_ROWS = 64  # rows of code problems are megabytes
_FILE_MAGIC = b"ARROW1"


class ArrowRows:
    """The rows of a Parquet or Arrow file. Raises `UserError` if it is damaged, or if pyarrow is not installed."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.ipc
            import pyarrow.parquet
        except ImportError as error:
            raise UserError(
                f"Reading {path} needs the package pyarrow, which is not installed.",
                "Run: pip install 'rollstream[parquet]'.",
            ) from error
        self._path = path
        try:
            mapped = self._as_arrow() if path.suffix == ".parquet" else pyarrow.memory_map(str(path))
            with path.open("rb") as file:
                is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            if is_file and path.suffix == ".arrow":
                reader = pyarrow.ipc.open_file(mapped)
                self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            else:
                self._batches = list(pyarrow.ipc.open_stream(mapped))
        except (pyarrow.ArrowException, OSError) as error:
            kind = "Parquet" if path.suffix == ".parquet" else "Arrow"
            raise unreadable(path, f"read as {kind}", error) from error
        self._ends = array("q")
        for batch in self._batches:
            self._ends.append((self._ends[-1] if self._ends else 0) + batch.num_rows)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def where(self, number: int) -> str:
        """`path, row 12`, counted from 0."""
        return f"{self._path}, row {number}"

    def read(self, number: int) -> Any:
        """Row `number` as a map. Dates become ISO text, decimal numbers text."""
        which = bisect_right(self._ends, number)
        first = self._ends[which - 1] if which else 0
        (row,) = self._batches[which].slice(number - first, 1).to_pylist()
        return _plain(row)

    def _as_arrow(self) -> Any:
        """The Parquet file as an Arrow stream in a file without a name, memory-mapped."""
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet

        with temporary_file(self._path) as plain, pyarrow.parquet.ParquetFile(self._path) as parquet:
            with pyarrow.ipc.new_stream(plain, parquet.schema_arrow) as sink:
                for batch in parquet.iter_batches(batch_size=BATCH_ROWS):
                    sink.write_batch(batch)
            plain.flush()
            return pyarrow.memory_map(f"/proc/self/fd/{plain.fileno()}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value) if isinstance(value, decimal.Decimal) else value
