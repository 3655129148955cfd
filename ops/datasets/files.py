"""Lines of JSON by their number: a file is read through once for where its lines begin, and never held in memory.

A compressed file has no places to go to, so it is unpacked into a temporary file that has no name.
"""

import errno
import gzip
import json
import os
import shutil
import tempfile
import weakref
import zlib
from array import array
from bisect import bisect_right
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

import zstandard

from ops.datasets.bad_rows import BadRow
from schemas import UserError

_BOM = b"\xef\xbb\xbf"


class Source(Protocol):
    """The raw rows of a file or of several, by number."""

    def __len__(self) -> int:
        """How many rows there are, bad ones included."""
        ...

    def read(self, number: int) -> Any:
        """Row `number`, from 0. Raises `BadRow` without a place if it cannot be read."""
        ...

    def where(self, number: int) -> str:
        """The place of row `number` in words: its file, and its line or row."""
        ...


class JsonLines:
    """A JSONL file, plain or compressed by gzip or zstandard. Blank lines are no rows.

    Memory: 16 bytes a row. The file stays open, so that another in its place changes nothing; one that is written to
    while it is read raises `UserError`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("q")
        self._lines = array("q")
        start = 0
        with _opened(path) as file:
            for line, text in enumerate(file, start=1):
                if (text if line > 1 else text.removeprefix(_BOM)).strip(b" \t\r\n"):
                    self._starts.append(start)
                    self._lines.append(line)
                start += len(text)
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._end = start
        self._written = self._last_written()

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, number: int) -> str:
        """`path, line 12`."""
        return f"{self._path}, line {self._lines[number]}"

    def read(self, number: int) -> Any:
        """The JSON value of row `number`. Raises `BadRow`, and `UserError` if the file has been written to since."""
        if self._last_written() != self._written:
            raise UserError(
                f"The data file {self._path} has been written to since it was opened: its rows are no longer the same.",
                "Put a new file in its place instead of writing into it, and start again.",
            )
        start = self._starts[number]
        end = self._starts[number + 1] if number + 1 < len(self._starts) else self._end
        text = os.pread(self._descriptor, end - start, start)
        first = self._lines[number] == 1
        try:  # "-sig": some editors begin a file with a byte order mark
            decoded = text.decode("utf-8-sig" if first else "utf-8")
        except UnicodeDecodeError as error:
            raise BadRow(f"this is no UTF-8: {error}", "Save the file as UTF-8.") from None
        try:
            return json.loads(decoded, parse_constant=_refuse)
        except RecursionError:
            raise BadRow("this is nested too deep", "Rows are maps of plain data.") from None
        except ValueError as error:
            cut = number + 1 == len(self._starts) and not text.endswith(b"\n")
            problem = "the last line is cut short" if cut else "this is no JSON"
            raise BadRow(f"{problem}: {error}", "Write one JSON object a line.") from None

    def _last_written(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _opened(path: Path) -> IO[bytes]:
    """The lines of `path`, unpacked if they are compressed."""
    try:
        if path.suffix == ".jsonl":
            return path.open("rb")
        with path.open("rb") as packed:
            plain = temporary_file(path)
            try:
                if path.suffix == ".gz":
                    with gzip.open(packed) as unpacked:
                        shutil.copyfileobj(unpacked, plain, 1 << 20)
                else:
                    _unpack_zstandard(packed, plain)
                plain.seek(0)
            except BaseException:
                plain.close()
                raise
            return plain
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise unreadable(path, "read", error) from error


def _unpack_zstandard(packed: IO[bytes], plain: IO[bytes]) -> None:
    """Unpack all frames. Raises `EOFError` for a file that is cut, of which the package's own reader says nothing."""
    unpacker, frame = zstandard.ZstdDecompressor(), None
    while chunk := packed.read(1 << 14):
        while chunk:
            frame = frame or unpacker.decompressobj()
            plain.write(frame.decompress(chunk))
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("it ends before its end was marked")


def temporary_file(path: Path) -> IO[bytes]:
    """A file without a name, for what `path` holds. Its folder is TMPDIR."""
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise unreadable(path, "unpacked", error) from error


def unreadable(path: Path, how: str, error: Exception) -> UserError:
    """That a file cannot be read, with the likeliest remedy."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"{path} does not fit, unpacked, into {tempfile.gettempdir()}: {error.strerror}.",
            "Set TMPDIR to a folder on a larger disk, or unpack the file yourself.",
        )
    said = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"{path} cannot be {how}: {said}.", "Write or fetch the file anew.")


class Joined:
    """Several sources, one after the other."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources
        self._ends = array("q")
        for source in sources:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(source))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _find(self, number: int) -> tuple[Source, int]:
        which = bisect_right(self._ends, number)
        return self._sources[which], number - (self._ends[which - 1] if which else 0)

    def read(self, number: int) -> Any:
        """As the source that holds it."""
        source, inner = self._find(number)
        return source.read(inner)

    def where(self, number: int) -> str:
        """As the source that holds it."""
        source, inner = self._find(number)
        return source.where(inner)
