"""Which files make up a version, and which files must stay: both follow from what stands on what."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Protocol

from bus.weights.files import WeightsMissing
from schemas import WeightVersion

KNOWN_EVENTS = 256  # that are remembered, so that following the log costs one event a version


class EventOf(Protocol):
    """The event of a version, from the log."""

    def __call__(self, version: int, /) -> Awaitable[WeightVersion]:
        """Raises `LookupError` if the log does not hold it."""


class Chains:
    """Follows deltas through the log, down to the full version that they begin with."""

    def __init__(self, event_of: EventOf) -> None:
        self._event_of = event_of
        self._known: dict[int, WeightVersion] = {}

    async def links(self, event: WeightVersion) -> list[WeightVersion]:
        """The events whose files make up a version, in the order in which they are applied: a full one, then deltas.

        Raises WeightsMissing if the log lacks one of them, or says what cannot be.
        """
        while len(self._known) >= KNOWN_EVENTS:
            del self._known[min(self._known)]
        self._known[event.version] = event
        links = [event]
        while links[-1].kind == "delta":
            last = links[-1]
            if not 0 <= last.base < last.version:
                raise WeightsMissing(f"version {last.version} is announced as a delta of version {last.base}")
            links.append(await self.event(last.base))
        if links[-1].kind != "full":
            raise WeightsMissing(f"version {links[-2].version} is a delta of version {links[-1].version}, an adapter")
        return links[::-1]

    async def event(self, version: int) -> WeightVersion:
        """The event of a version. Raises WeightsMissing."""
        if version not in self._known:
            try:
                self._known[version] = await self._event_of(version)
            except LookupError as error:
                raise WeightsMissing(f"version {version} is not in the log: {error}") from None
        return self._known[version]


def needed(files: Iterable[tuple[int, int]], keep_from: int, keep: Iterable[int]) -> set[int]:
    """Versions whose files must stay: from `keep_from` on, those in `keep`, and all that these stand on.

    `files` are (version, the version that it stands on or -1); a version may have several.
    """
    stays = set(keep)
    for version, base in sorted(files, reverse=True):  # what stands on something is newer than that
        if version >= keep_from or version in stays:
            stays |= {version, base}
    return stays - {-1}
