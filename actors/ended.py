"""Which samples were ended without being trained, as the log tells it: nobody waits for their turns any more."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Coroutine
from typing import Any, TypeVar

from bus.port import Bus
from bus.table import DROPPED
from schemas import sample_id

T = TypeVar("T")

KNOWN_MAX = 65_536  # ended samples that are remembered; work on older ones ends by its own bounds


class Ended:
    """Follows the drops from now on. `follow` must run beside whoever asks."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: OrderedDict[str, None] = OrderedDict()  # the newest last
        self._running: defaultdict[str, set[asyncio.Future[Any]]] = defaultdict(set)

    async def follow(self) -> None:
        """Read what is dropped from now on, for ever."""
        start = (await self._bus.info(DROPPED)).last_seq + 1
        async for entry in self._bus.read(DROPPED, start):
            if entry.sample is not None:
                self.add(sample_id(*entry.sample))

    def add(self, sample: str) -> None:
        """A sample has ended."""
        self._known[sample] = None
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        for work in self._running.get(sample, ()):
            work.cancel()

    async def unless(self, sample: str, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of the work for a sample; None if the sample has ended before the work has."""
        if sample in self._known:
            work.close()
            return None
        task = asyncio.ensure_future(work)
        self._running[sample].add(task)
        try:
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()
        finally:
            task.cancel()  # if it is us who were cancelled
            running = self._running[sample]
            running.discard(task)
            if not running:
                del self._running[sample]
