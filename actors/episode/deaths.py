"""Episodes that end their worker's process, told by what it left: dropped after `DEATHS_MAX` times, so others go on.

Each death that is one episode's doing is noted on the log, for whichever worker has the sample next. Such a sample then
waits for a quiet moment, and runs while no other of its kind does. Where a death may be the doing of several, nobody is
blamed: the next life runs half as many episodes at a time, and twice as many again with each round that it survives,
so that whoever does it again is soon alone. Deaths of before the newest start of the run are forgotten: then somebody
has mended the function.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import structlog

from actors.episode.running import Fallen, Running, left_by
from bus.port import Bus
from bus.reading import read_to_end
from bus.table import CONTROL, NOTES, ROLLOUTS
from schemas import Control, Note, UserError, parse_sample_id
from schemas.errors import mend_and_resume

log = structlog.get_logger()

DEATHS_MAX = 3  # of one sample's worker while its episode ran
DEATHS_FIRST_MAX = 8  # of any, and no episode was ever finished: then the function as a whole is held to be broken
DETAIL_CHARS_MAX = 1000
QUIET_S = 30.0  # for which a sample that ended its worker waits, at most, for the others to end
LOOK_S = 0.05


class Deaths:
    """`died` tells how the worker before this one of that name ended, empty if in order; `record` is where it wrote.

    `what` is run, by the recipe's word for it.
    """

    def __init__(self, bus: Bus, what: str, at_once: int, record: Path | None = None, died: str = "") -> None:
        self.running = Running(None, 0)  # until `start`
        self._bus = bus
        self._what = what
        self._record = record
        self._died = died
        self._at_once = self._most = at_once
        self._survived = 0
        self._since_s = 0.0  # Unix seconds of the newest start of the run
        self._harmless = 0
        self._alone = asyncio.Lock()

    @property
    def most(self) -> int:
        """Episodes that may run at once, as far as deaths are concerned."""
        return self._most

    async def start(self) -> None:
        """Note what the worker before us died of. Raises `UserError` if the function only ever ends its process."""
        async for entry in read_to_end(self._bus, CONTROL):
            message = entry.message()
            if isinstance(message, Control) and message.action == "start":
                self._since_s = entry.time_s
        fallen = left_by(self._record) if self._record is not None else None
        if fallen is not None and self._died:
            await self._blame(fallen)
        self.running = Running(self._record, self._at_once)

    def close(self) -> None:
        """This life ends in order."""
        self.running.close()

    async def _blame(self, fallen: Fallen) -> None:
        how = fallen.words or self._died
        if fallen.culprit is None:
            if fallen.running:
                self._most = max(1, len(fallen.running) // 2)
                log.warning("episodes_ended_their_process", how=how, running=len(fallen.running), next=self._most)
            return
        sample = parse_sample_id(fallen.culprit)
        assert sample is not None
        group, index = sample
        number = len(await self._noted(fallen.culprit))
        log.warning("episode_ended_its_process", sample=fallen.culprit, how=how, times=number + 1)
        detail = how[:DETAIL_CHARS_MAX]
        await self._bus.publish(Note(group_id=group, index=index, number=number, kind="died", detail=detail))
        if (await self._bus.info(ROLLOUTS)).last_seq:
            return
        deaths = len([entry async for entry in read_to_end(self._bus, NOTES) if entry.time_s >= self._since_s])
        if deaths >= DEATHS_FIRST_MAX:
            raise UserError(
                f"The episode {self._what} ended its process {deaths} times, and was never finished. The last time its "
                f"worker {how}, while sample {fallen.culprit} ran.",
                mend_and_resume("the samples are kept"),
            )

    async def of(self, sample: str) -> list[str]:
        """How the workers ended that died of a sample since the run's newest start, in order."""
        return [detail for time_s, detail in await self._noted(sample) if time_s >= self._since_s]

    async def _noted(self, sample: str) -> list[tuple[float, str]]:
        found: list[tuple[float, str]] = []
        while (entry := await self._bus.last(NOTES, f"{sample}/{len(found)}")) is not None:
            note = entry.message()
            assert isinstance(note, Note)
            if note.kind != "died":
                break  # of an agent from outside, which is in no process of ours
            found.append((entry.time_s, note.detail))
        return found

    @contextlib.asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        """For an episode that ended no worker yet."""
        self._harmless += 1
        try:
            yield
        finally:
            self._harmless -= 1
            self._survived += 1
            if self._survived >= self._most:
                self._survived = 0
                self._most = min(self._at_once, 2 * self._most)

    @contextlib.asynccontextmanager
    async def in_quiet(self) -> AsyncIterator[None]:
        """For one that did: when the others have ended, or after `QUIET_S`."""
        async with self._alone:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET_S):
                    await _until(lambda: not self._harmless)
            yield


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(LOOK_S)
