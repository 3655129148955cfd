"""Metrics as JSON lines: `pandas.read_json(path, lines=True)`, jq, or any plotter reads them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
from pathlib import Path
from typing import TextIO

from ops.metrics.records import Key, Record
from schemas import UserError


class JsonLines:
    """A file of one line a record. A line that was cut when its writer was killed is taken away and written again.

    Raises `UserError` if the file holds something else, or is being written by somebody else.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._written: set[Key] = set()
        self._run = run
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from None
        try:
            self._resume(path)
        except BaseException:
            self._file.close()
            raise

    def _resume(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path} is being written by another process.", "Name another file.") from None
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                fields = json.loads(line)
                run, key = fields["run"], (str(fields["stream"]), str(fields["id"]))
            except (ValueError, KeyError, TypeError):
                remedy = "Name another file; this one is left as it is."
                raise UserError(f"{path}, line {number}, is not a line of metrics.", remedy) from None
            if run != self._run:
                raise UserError(f"{path} holds metrics of {run}, not of {self._run}.", "Name another file.")
            self._written.add(key)
            whole += len(line)
        self._file.truncate(whole)

    def has(self, record: Record) -> bool:
        """See `Sink`."""
        return record.key in self._written

    def write(self, record: Record) -> None:
        """See `Sink`."""
        line = (json.dumps(record.fields(self._run)) + "\n").encode()
        while line:
            line = line[self._file.write(line) or 0 :]
        self._written.add(record.key)

    def close(self) -> None:
        """See `Sink`."""
        self._file.close()


class Printed:
    """Standard output; it remembers nothing from before."""

    def __init__(self, run: str, file: TextIO | None = None) -> None:
        self._written: set[Key] = set()
        self._run = run
        self._file = file or sys.stdout

    def has(self, record: Record) -> bool:
        """See `Sink`."""
        return record.key in self._written

    def write(self, record: Record) -> None:
        """See `Sink`."""
        print(json.dumps(record.fields(self._run)), file=self._file, flush=True)
        self._written.add(record.key)

    def close(self) -> None:
        """See `Sink`."""
        with contextlib.suppress(ValueError):
            self._file.flush()
