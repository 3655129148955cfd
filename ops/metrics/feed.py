"""From a run's log into sinks: once to its end, or as long as the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from bus.port import Bus, BusUnavailable, Entry
from bus.reading import read_to_end
from bus.table import CONTROL, Stream
from ops.metrics.config import MetricsConfig
from ops.metrics.jsonl import JsonLines
from ops.metrics.records import READ, Record, Sink, record_of
from ops.metrics.tensorboard import EventFiles
from schemas import Control, MalformedMessage, UserError

if TYPE_CHECKING:
    from ops.log_source import LogSource

log = structlog.get_logger()

LOOK_S = 1.0  # how often a follower looks for more
AGAIN_S = 5.0  # after a sink could not be written
QUEUE_MAX = 64  # entries read and not yet written


async def copy(source: LogSource, sinks: Sequence[Sink], follow: bool, stop: asyncio.Event) -> int:
    """Write what a log holds, and with `follow` what comes, until the run's end is announced; returns how many.

    Raises:
        OSError: a sink cannot be written.
    """
    starts = dict.fromkeys((*READ, CONTROL), 1)
    written, ended = 0, not follow
    while not stop.is_set():
        last = ended  # what was stored before the end is read after it was seen
        for stream in READ:
            async with contextlib.aclosing(source.read(stream, starts[stream])) as entries:
                async for entry in entries:
                    starts[stream] = entry.seq + 1
                    record = record_of(entry)
                    written += record is not None and await asyncio.to_thread(_put, sinks, record)
                    if stop.is_set():
                        return written
        if last:
            break
        async with contextlib.aclosing(source.read(CONTROL, starts[CONTROL])) as controls:
            async for entry in controls:
                starts[CONTROL] = entry.seq + 1
                with contextlib.suppress(MalformedMessage):
                    message = entry.message()
                    if isinstance(message, Control) and message.action in ("start", "stop"):
                        ended = message.action == "stop"
        if not ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)
    return written


@contextlib.asynccontextmanager
async def written_beside(
    bus: Bus, config: MetricsConfig, folder: Path, recipe_yaml: str, again_s: float = AGAIN_S
) -> AsyncIterator[None]:
    """While inside, a run's metrics are written into its folder; at the end all that the log holds by then.

    A sink that cannot be written (a full disk) is told in the log and tried again: the run does not depend on it.
    """

    def open_sinks() -> list[Sink]:
        sinks: list[Sink] = []
        if config.jsonl:
            sinks.append(JsonLines(folder / "metrics.jsonl", bus.run))
        if config.tensorboard:
            sinks.append(EventFiles(folder / "tensorboard", bus.run, recipe_yaml))
        return sinks

    if not (config.jsonl or config.tensorboard):
        yield
        return
    ending = asyncio.Event()
    task = asyncio.create_task(_keep_writing(bus, open_sinks, again_s, ending), name="writes metrics")
    try:
        yield
    finally:
        ending.set()
        await task


async def _keep_writing(bus: Bus, open_sinks: Callable[[], list[Sink]], again_s: float, ending: asyncio.Event) -> None:
    """Not to be cancelled: a file that a thread has just opened would stay open, and locked."""
    while True:
        last = ending.is_set()
        try:
            with contextlib.closing(_Sinks(await asyncio.to_thread(open_sinks))) as sinks:
                await _follow(bus, sinks, ending)
                for stream in READ:
                    async for entry in read_to_end(bus, stream):
                        await sinks.take(entry)
                return
        except (OSError, UserError, BusUnavailable) as error:
            log.warning("metrics_not_written", reason=str(error))
        if last:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), again_s)


async def _follow(bus: Bus, sinks: _Sinks, ending: asyncio.Event) -> None:
    """Write what comes until `ending`."""
    entries: asyncio.Queue[Entry] = asyncio.Queue(QUEUE_MAX)

    async def read(stream: Stream) -> None:
        async for entry in bus.read(stream):
            await entries.put(entry)

    side: list[asyncio.Task[Any]] = [asyncio.create_task(read(stream), name=f"reads {stream.name}") for stream in READ]
    side.append(asyncio.create_task(ending.wait()))
    get = asyncio.create_task(entries.get())
    try:
        while True:
            await asyncio.wait([get, *side], return_when=asyncio.FIRST_COMPLETED)
            for task in side:
                if task.done():
                    task.result()
            if ending.is_set():
                return
            await sinks.take(get.result())
            get = asyncio.create_task(entries.get())
    finally:
        for task in (get, *side):
            task.cancel()
        await asyncio.gather(get, *side, return_exceptions=True)


class _Sinks:
    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    async def take(self, entry: Entry) -> None:
        record = record_of(entry)
        if record is not None and not all(sink.has(record) for sink in self._sinks):
            await asyncio.to_thread(_put, self._sinks, record)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _put(sinks: Sequence[Sink], record: Record) -> bool:
    """Write a record where it is not yet; whether it was new to one."""
    new = [sink for sink in sinks if not sink.has(record)]
    for sink in new:
        sink.write(record)
    return bool(new)
