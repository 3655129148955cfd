"""What a reward function's code is: the bytes of the user's files that were run for it, and their digest.

Imported by the reward child, which must start fast: the standard library only.

A process that is started later, since one was killed, must run the same code, whatever the files say by then: only a
reload changes it. So the first process tells the bytes that it ran, and the others run those.
"""

import json
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
SOURCES_BYTES_MAX = 2 << 20  # that are handed to later processes; who has more finds the files as they are then
DIGEST_CHARS = 16  # of 64: it tells states of one function apart, it guards nothing


class Sources(MetaPathFinder):
    """Imports from the user's folders, noting the bytes. `kept` are run instead of what the files hold now."""

    def __init__(self, kept: Mapping[str, bytes] | None = None) -> None:
        self.kept = dict(kept or {})
        self.ran: dict[str, bytes] = {}
        """By path, the files that were run."""
        self._own: dict[str, bytes] = {}
        self._folders: list[Path] = []
        self._installed: list[Path] = []

    def watch(self, folders: Iterable[Path]) -> None:
        """From now on modules in these folders are imported by this. What is installed is left alone."""
        self._folders.extend(folder.resolve() for folder in folders)
        self._installed = _installed()
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def note(self, path: Path) -> None:
        """Count a file of an installed function among what makes it; it is not kept for later processes."""
        if str(path) not in self.ran and path.is_file():
            self._own[str(path)] = path.read_bytes()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the import system asks; None for what is not the user's."""
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader) or spec.origin is None:
            return None
        if not self._covers(Path(spec.origin)):
            return None
        spec.loader = _Loader(fullname, spec.origin, self)
        return spec

    def of_file(self, name: str, path: Path) -> ModuleSpec | None:
        """The spec of a module that is read from this file."""
        return spec_from_file_location(name, path, loader=_Loader(name, str(path), self))

    def read(self, path: str) -> bytes:
        """The bytes to run for a file."""
        body = self.kept.get(path)
        if body is None:
            body = Path(path).read_bytes()
        self.ran[path] = body
        return body

    def digest(self, spec: str, options: Mapping[str, Any], base: Path | None) -> str:
        """Equal for equal code and options, on any machine: files count by their path from the recipe's folder."""
        told = sha256(json.dumps([spec, options], sort_keys=True, default=str).encode())
        files = {_from(base, path): body for path, body in (self._own | self.ran).items()}
        for name in sorted(files):
            told.update(f"\0{name}\0{sha256(files[name]).hexdigest()}".encode())
        return f"sha256-{told.hexdigest()[:DIGEST_CHARS]}"

    def _covers(self, path: Path) -> bool:
        path = path.resolve()
        return any(folder in path.parents for folder in self._folders) and not any(
            folder in path.parents for folder in self._installed
        )


class _Loader(SourceFileLoader):
    """Runs what `Sources` says; compiled files beside the source are of no use, since they follow the newest."""

    def __init__(self, fullname: str, path: str, sources: Sources) -> None:
        super().__init__(fullname, path)
        self._sources = sources

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        return self.source_to_code(self._sources.read(path), path)


def _installed() -> list[Path]:
    """Folders of installed packages, which may lie within the user's, and our own."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {site.getusersitepackages()}
    return [*(Path(folder).resolve() for folder in found if folder), _ROOT / "actors", _ROOT / "schemas"]


def _from(base: Path | None, path: str) -> str:
    try:
        return Path(path).relative_to((base or Path.cwd()).resolve()).as_posix()
    except ValueError:
        return Path(path).name
