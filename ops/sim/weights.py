"""Weights on the simulated disk: published in full or as deltas, and read by the chains of the log, as in a real run.

A file holds the text of a version; a delta's begins with the digest of the base, without which it says nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bus.port import Bus
from bus.table import WEIGHTS
from bus.weights import Local, Snapshot, WeightsMissing
from bus.weights.chain import Chains, needed
from bus.weights.files import delta_name, digest_of, full_file, full_name, version_and_base
from ops.sim.fakes import Disk, bytes_of, check_room
from ops.sim.world import Process
from schemas import WeightVersion

DELTA = "delta of "
MADE = 2  # full files that a worker keeps, as `bus.weights.HostCache` does


def whole_of(contents: str) -> tuple[str, str]:
    """The digest of the base and the text of a version in the contents of its file; a full file has no base."""
    if not contents.startswith(DELTA):
        return "", contents
    base, _, whole = contents.removeprefix(DELTA).partition("\n")
    return base, whole


class MemoryWriter:
    """`bus.weights.WeightWriter` on the simulated disk."""

    def __init__(self, process: Process, disk: Disk, full_every: int) -> None:
        self._process = process
        self._disk = disk
        self._full_every = full_every

    def snapshot(self, version: int, weights: Mapping[str, Any]) -> Snapshot:
        """See `WeightWriter.snapshot`."""
        return Snapshot(version, bytes_of(version, weights["state"]).encode())

    def publish(self, snapshot: Snapshot, before: Snapshot | None = None) -> WeightVersion:
        """See `WeightWriter.publish`."""
        check_room(self._process)
        version, digest, contents = snapshot.version, snapshot.digest, snapshot.content.decode()
        event = full_file(version, digest, len(contents))
        if version % self._full_every and before is not None and before.version == version - 1:
            contents = f"{DELTA}{before.digest}\n{contents}"
            event = WeightVersion(
                version=version,
                kind="delta",
                base=before.version,
                path=delta_name(version, digest, before.version),
                digest=digest_of(contents.encode()),
                nbytes=len(contents),
                result=digest,
            )
            self._process.world.count("a version was published as a delta")
        self._disk.weights[event.path] = contents
        self._process.world.note(f"wrote weights {event.path}")
        return event

    def collect(self, keep_from_version: int, keep: set[int]) -> list[int]:
        """See `WeightWriter.collect`."""
        places = {path: place for path in self._disk.weights if (place := version_and_base(path))}
        stays = needed(places.values(), keep_from_version, keep)
        gone = {path: version for path, (version, _) in places.items() if version not in stays}
        for path in gone:
            del self._disk.weights[path]
        if gone:
            self._process.world.note(f"collected weights {sorted(gone.values())}")
        return sorted(set(gone.values()))


class MemoryWeights:
    """`bus.weights.WeightReader` on the simulated disk. `made` are the full files that this worker has made itself."""

    def __init__(self, process: Process, disk: Disk, bus: Bus) -> None:
        self.made: dict[str, str] = {}
        self._process = process
        self._disk = disk
        self._bus = bus
        self._chains = Chains(self._event_of)

    async def fetch(self, event: WeightVersion) -> Local:
        """See `WeightReader.fetch`."""
        links = await self._chains.links(event)
        return Local(Path(await asyncio.to_thread(self._full_file, links)))

    def close(self) -> None:
        """See `WeightReader.close`."""

    async def _event_of(self, version: int) -> WeightVersion:
        (entry,) = await self._bus.get(WEIGHTS, [version + 1])
        message = entry.message()
        assert isinstance(message, WeightVersion)
        return message

    def _full_file(self, links: list[WeightVersion]) -> str:
        files = {**self._disk.weights, **self.made}
        names = [full_name(event.version, event.result_digest) for event in links]
        start = next((place for place in reversed(range(len(links))) if names[place] in files), None)
        if start is None or any(event.path not in files for event in links[start + 1 :]):
            self._process.world.count("weights were collected before a worker had them")
            raise WeightsMissing(f"version {links[-1].version} cannot be made of what is there")
        content = files[names[start]].encode()
        for event in links[start + 1 :]:
            base, whole = whole_of(files[event.path])
            if base != digest_of(content):
                self._process.world.violate("I4", f"version {event.version} is made of other weights than its delta's")
            content = whole.encode()
        if digest_of(content) != links[-1].result_digest:
            self._process.world.violate("I4", f"version {links[-1].version} is announced with another digest")
        if start < len(links) - 1:
            self._process.world.count("a worker made a version of deltas")
            self.made[names[-1]] = content.decode()
            for name in sorted(self.made)[:-MADE]:
                del self.made[name]
        return names[-1]
