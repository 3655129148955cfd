"""Reading what a stream holds now, where `Bus.read` would wait for more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from bus.port import Bus, BusUnavailable, Entry
from bus.table import Stream

SILENCE_S = 30.0  # an entry that is there and does not come for so long never will


async def read_to_end(
    bus: Bus, stream: Stream, start: int = 1, stop: int | None = None, silence_s: float = SILENCE_S
) -> AsyncGenerator[Entry, None]:
    """The entries with `start <= seq < stop` that are there now, in order.

    Raises:
        BusUnavailable: one that is there does not come within `silence_s`.
    """
    info = await bus.info(stream)
    last = info.last_seq if stop is None else min(info.last_seq, stop - 1)
    if not info.messages or start > last:
        return
    entries = aiter(bus.read(stream, start))
    try:
        while True:
            async with asyncio.timeout(silence_s):
                entry = await anext(entries)
            if entry.seq <= last:
                yield entry
            if entry.seq >= last:  # the newest of a key may have been replaced by a later one meanwhile
                return
    except TimeoutError:
        raise BusUnavailable(
            f"the {stream.name} cannot be read to their end, {last}: nothing came for {silence_s:.0f} s"
        ) from None
    finally:
        await entries.aclose()  # type: ignore[attr-defined]
