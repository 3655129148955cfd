"""Which files make up a version: the full one that is nearest below it, and the deltas from there."""

from collections.abc import Mapping

from bus.weights.files import WeightsMissing
from schemas import WeightVersion


def chain_of(version: int, events: Mapping[int, WeightVersion]) -> list[WeightVersion]:
    """The events whose files make up `version`, in the order in which they are applied, a full one first.

    Raises WeightsMissing if `events` lack one of them; `missing_link` names it.
    """
    missing = missing_link(version, events)
    if missing is not None:
        raise WeightsMissing(f"version {version} stands on version {missing}, which was never announced")
    links = [events[version]]
    while links[-1].kind == "delta":
        links.append(events[links[-1].base])
    return links[::-1]


def missing_link(version: int, events: Mapping[int, WeightVersion]) -> int | None:
    """The first version below that `events` would have to hold for `chain_of`, None if it is complete.

    Raises WeightsMissing if a delta stands on a version that is not before it.
    """
    while (event := events.get(version)) is not None:
        if event.kind != "delta":
            return None
        if not 0 <= event.base < version:
            raise WeightsMissing(f"version {version} is announced as a delta of version {event.base}")
        version = event.base
    return version
