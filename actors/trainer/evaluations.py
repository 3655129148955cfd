"""What the trainer reads of evaluations when it saves: which checkpoint is the best, and which may still become it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import structlog

from actors.evaluator.schedule import lease_name
from actors.trainer.retention import Judged
from bus.port import Bus, BusUnavailable, Entry
from bus.reading import read_to_end
from bus.table import EVALUATIONS, LEASES
from schemas import Evaluation, MalformedMessage

log = structlog.get_logger()

WAIT_S = 2.0  # for the log to answer; what it does not tell by then is taken at the next save


class Evaluations:
    """A fold over the evaluations of a run, of which every `every`-th version is due. Training does not depend on it.

    Scores on other data than those of the newest evaluation do not count: the held-out problems were changed.
    """

    def __init__(self, bus: Bus, every: int) -> None:
        self._bus = bus
        self._every = every
        self._folded_seq = 0
        self._data = ""  # of the newest evaluation
        self._scores: dict[str, dict[int, float]] = {}  # by data, then by version
        self._done: set[int] = set()  # evaluated or skipped

    async def judged(self, versions: Iterable[int]) -> Judged:
        """The scores, and which of `versions` are being evaluated now. Takes `WAIT_S` at most, and never fails."""
        at_work: set[int] = set()
        try:
            async with asyncio.timeout(WAIT_S):
                async for entry in read_to_end(self._bus, EVALUATIONS, self._folded_seq + 1, silence_s=WAIT_S):
                    self._fold(entry)
                for version in versions:
                    due = version % self._every == 0 and version not in self._done
                    if due and await self._bus.last(LEASES, lease_name(version)) is not None:
                        at_work.add(version)
        except (TimeoutError, BusUnavailable) as error:
            log.warning("evaluations_not_read", reason=f"{type(error).__name__}: {error}")
        return Judged(dict(self._scores.get(self._data, {})), frozenset(at_work))

    def _fold(self, entry: Entry) -> None:
        self._folded_seq = entry.seq
        with contextlib.suppress(MalformedMessage):  # it says nothing
            message = entry.message()
            assert isinstance(message, Evaluation)
            self._data = message.data
            self._done |= {message.version, *message.skipped.tolist()}
            if message.reward is not None:
                self._scores.setdefault(message.data, {})[message.version] = message.reward
