"""What a judge said before, by the content of the request: in memory, or in a file that many processes share."""

import json
import sqlite3
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from schemas.errors import UserError

ENTRIES_MAX = 10_000  # in memory; a reply has a few hundred bytes
BUSY_S = 2.0  # to wait for another process that writes


class Cache(Protocol):
    """Replies by request. A cache that fails is one that has nothing."""

    def get(self, body: Mapping[str, Any]) -> str | None:
        """The reply to this request, if it was kept."""

    def put(self, body: Mapping[str, Any], text: str) -> None:
        """Keep a reply."""


def open_cache(where: str | None, base: Path | None) -> Cache:
    """`memory`, a file relative to `base`, or None for no cache. Raises `UserError` if the file cannot be used."""
    if where is None:
        return _Nothing()
    if where == "memory":
        return _Memory()
    path = (base or Path.cwd()) / Path(where).expanduser()
    try:
        return _File(path)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"The judge's cache {path} cannot be used: {error}.", "Give another file.") from None


def key_of(body: Mapping[str, Any]) -> str:
    """Equal for equal requests."""
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class _Nothing:
    def get(self, body: Mapping[str, Any]) -> str | None:
        return None

    def put(self, body: Mapping[str, Any], text: str) -> None: ...


class _Memory:
    def __init__(self) -> None:
        self._kept: OrderedDict[str, str] = OrderedDict()

    def get(self, body: Mapping[str, Any]) -> str | None:
        return self._kept.get(key_of(body))

    def put(self, body: Mapping[str, Any], text: str) -> None:
        self._kept[key_of(body)] = text
        if len(self._kept) > ENTRIES_MAX:
            self._kept.popitem(last=False)


class _File:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        with closing(self._open()) as file:
            file.execute("PRAGMA journal_mode=WAL")
            file.execute("CREATE TABLE IF NOT EXISTS said (request TEXT PRIMARY KEY, text TEXT NOT NULL)")
            file.commit()

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=BUSY_S)

    def get(self, body: Mapping[str, Any]) -> str | None:
        try:
            with closing(self._open()) as file:
                row = file.execute("SELECT text FROM said WHERE request = ?", [key_of(body)]).fetchone()
        except sqlite3.Error:
            return None
        return str(row[0]) if row else None

    def put(self, body: Mapping[str, Any], text: str) -> None:
        try:
            with closing(self._open()) as file:
                file.execute("INSERT OR REPLACE INTO said VALUES (?, ?)", [key_of(body), text])
                file.commit()
        except sqlite3.Error:
            return
