"""A worker's way to the bytes of a version: by what can be reached, and never other bytes than those announced.

    fetch(event)
      full      the file in the weights directory, or fetched over the bus into the host's cache
      delta     made in the host's cache: the nearest full file at hand, and the deltas of the log behind it
      adapter   its file, and the full file of the version that it stands on

What comes of deltas is a full file again, byte for byte, and its digest is that in the event. So it does not matter by
which road it came, and all workers of a host map one file.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Protocol

import structlog

from bus.weights import delta
from bus.weights.cache import HostCache
from bus.weights.chain import Chains, EventOf
from bus.weights.directory import WeightStore
from bus.weights.files import (
    Buffer,
    WeightsCorrupt,
    WeightsError,
    WeightsMissing,
    check_file,
    digest_of,
    digest_of_file,
    full_file,
    full_name,
)
from schemas import WeightVersion

log = structlog.get_logger()


class Source(Protocol):
    """Another way to the files, where the directory is not there; `bus.weights.objects.ObjectRoad` is it."""

    def get(self, name: str) -> bytearray:
        """The file that was put under a name. Raises WeightsMissing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Local:
    """Where a version lies on this machine: a full file, or a LoRA adapter and the full file `base` below it."""

    path: Path
    base: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Checked:
    """A file whose bytes were those of a digest when it was in this state."""

    digest: str
    path: Path
    state: tuple[int, int, int]  # inode, size, time of the last change in ns

    @classmethod
    def now(cls, event: WeightVersion, path: Path) -> _Checked | None:
        try:
            stat = path.stat()
        except OSError:
            return None
        return cls(event.result_digest, path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


class WeightReader:
    """Gets versions for the workers of one process. `event_of` looks events up in the log."""

    def __init__(self, event_of: EventOf, store: WeightStore, cache: HostCache, road: Source | None = None) -> None:
        self._chains = Chains(event_of)
        self._store = store
        self._cache = cache
        self._road = road
        self._base: _Checked | None = None

    async def fetch(self, event: WeightVersion) -> Local:
        """The version on this machine, every byte checked; those of an adapter's base once, unless it is touched.

        Raises WeightsMissing or WeightsCorrupt if it cannot be had now. Then a newer full version can be, or this one
        once the trainer was started again, which writes its newest version in full.
        """
        if event.kind == "adapter":
            base = await self._base_of(event)
            return Local(await asyncio.to_thread(self._file, event, event.base), base)
        links = await self._chains.links(event)
        return Local(await asyncio.to_thread(self.full_file, links))

    async def _base_of(self, event: WeightVersion) -> Path:
        """The full file below an adapter. It may be a thousand times as large, and is the same for every version."""
        base = await self._chains.event(event.base)
        if base.kind == "adapter":
            raise WeightsMissing(f"version {event.version} is an adapter over version {base.version}, which is another")
        if self._base is None or self._base != _Checked.now(base, self._base.path):
            path = (await self.fetch(base)).path
            self._base = _Checked.now(base, path)
        if self._base is None:
            raise WeightsMissing(f"version {base.version} was removed")
        return self._base.path

    def close(self) -> None:
        """Leave the cache."""
        self._cache.close()

    def full_file(self, links: list[WeightVersion]) -> Path:
        """The full file of the last of the links, which `Chains` gave. Blocks. Raises as `fetch` does."""
        wanted = links[-1]
        if wanted.kind == "full":
            return self._file(wanted)
        self._cache.open()
        with contextlib.suppress(WeightsError):
            return self._made(wanted)
        with self._cache.building():
            with contextlib.suppress(WeightsError):
                return self._made(wanted)
            try:
                content = self._build(links)
            except WeightsError as error:
                try:  # such as a trainer that was started again puts there
                    content = self._carried(full_file(wanted.version, wanted.result, 0), error)
                except WeightsMissing:
                    raise error from None
            return self._cache.put(_name(wanted), content)

    # ---- files; all of it blocks

    def _file(self, event: WeightVersion, keep: int = -1) -> Path:
        """The file that an event announces, checked, in the directory or else in the cache."""
        try:
            return self._store.verify(event)
        except WeightsError as error:
            self._cache.open()
            with contextlib.suppress(WeightsError):
                return check_file(event, self._cache.path(event.path))
            if self._road is None:
                raise
            otherwise = error
        with self._cache.building():
            with contextlib.suppress(WeightsError):
                return check_file(event, self._cache.path(event.path))
            return self._cache.put(event.path, self._carried(event, otherwise), keep)

    def _carried(self, event: WeightVersion, otherwise: WeightsError) -> bytearray:
        """The bytes that an event announces, checked, over the bus; raises `otherwise` if that is no road for us."""
        if self._road is None:
            raise otherwise
        content = self._road.get(event.path)
        if digest_of(content) != event.digest:
            raise WeightsCorrupt(f"version {event.version} came over the bus with another digest than {event.digest}")
        return content

    def _bytes(self, event: WeightVersion) -> Buffer:
        """The bytes that an event announces, checked, from wherever they are."""
        try:
            return self._store.verify(event).read_bytes()
        except WeightsError as error:
            return self._carried(event, error)

    def _made(self, event: WeightVersion) -> Path:
        """The full file of a version that was announced as a delta, checked, if there is one already."""
        for path in (self._cache.path(_name(event)), self._store.root / _name(event)):
            with contextlib.suppress(OSError):
                if digest_of_file(path) == event.result:
                    return path
        raise WeightsMissing(f"version {event.version} was not made yet")

    def _build(self, links: list[WeightVersion]) -> bytearray:
        """The bytes of the last link's full file, made of what is nearest at hand.

        A full file is believed to be what its name says: the digest of what is made of it tells in the end.
        """
        wanted, refused = links[-1], set[Path]()
        while True:
            place, path = self._nearest(links, refused)
            try:
                content = bytearray(self._bytes(links[0])) if path is None else bytearray(path.read_bytes())
            except OSError:  # removed meanwhile
                refused.update([path] if path else [])
                continue
            try:
                for before, event in itertools.pairwise(links[place:]):
                    delta.apply(self._bytes(event), content, before.result_digest, event.result_digest)
                if digest_of(content) != wanted.result:
                    raise WeightsCorrupt(
                        f"version {wanted.version}, made of version {links[place].version}, has another digest than "
                        f"{wanted.result}: a newer full version will do, such as a restarted trainer writes"
                    )
            except WeightsCorrupt:
                if path is None or not self._is_damaged(path, links[place]):
                    raise
                log.warning("weights_file_damaged", version=links[place].version, path=str(path))
                refused.add(path)
            else:
                return content

    def _nearest(self, links: list[WeightVersion], refused: set[Path]) -> tuple[int, Path | None]:
        """The newest link below the last whose full file seems to be at hand; the first one if none is."""
        for place in reversed(range(len(links) - 1)):
            for folder in (self._cache.folder, self._store.root):
                path = folder / _name(links[place])
                if path not in refused and path.is_file():
                    return place, path
        return 0, None

    def _is_damaged(self, path: Path, event: WeightVersion) -> bool:
        with contextlib.suppress(OSError):
            if digest_of_file(path) == event.result_digest:
                return False
        if path.parent == self._cache.folder:
            path.unlink(missing_ok=True)
        return True


def _name(event: WeightVersion) -> str:
    """The name of a version's full file."""
    return full_name(event.version, event.result_digest)
