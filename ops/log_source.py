"""One way to read a run's log to its end, be it a run that goes on, one that has ended, or a recording."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from bus import bulk
from bus.jetstream import JetStreamBus
from bus.port import Bus, BusUnavailable, Entry, StreamInfo
from bus.reading import read_to_end
from bus.table import CONTROL, Stream
from ops.folders import find_folder
from ops.host import initial_model
from ops.launch import locate
from ops.nats_server import START_TIMEOUT_S, NatsServer, in_use, url_of
from ops.recording.cut import Cut, cut_of
from ops.recording.format import SUFFIX
from ops.recording.reader import Recording, open_recording
from schemas import Control, MalformedMessage, UserError

LOOK_S = 0.1  # how often a reader looks whether the server that it reads from is still there


class LogSource(Protocol):
    """A run's log as it is now, to be read and not to be written.

    `recipe_yaml` is the recipe of the newest start; empty if the log holds none. `damage` says in sentences what of it
    cannot be read, as far as it was read or looked for; empty when whole.
    """

    run: str
    recipe_yaml: str

    @property
    def damage(self) -> tuple[str, ...]:
        """What is wrong with it; empty when whole. Grows while damaged parts are read, which are left out."""

    async def cut(self) -> Cut:
        """Up to where the streams are consistent with each other."""

    async def info(self, stream: Stream) -> StreamInfo:
        """What the stream holds."""

    def read(self, stream: Stream, start: int = 1, stop: int | None = None) -> AsyncGenerator[Entry, None]:
        """The entries with `start <= seq < stop` that are there now, in order; then it ends."""

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        """The entries at these sequences, in this order. Raises `LookupError` if one is not there."""


class RunLog:
    """The log of a run folder, on a connected bus; see `LogSource`. Read in bulk from `bulk_url` if given."""

    damage: tuple[str, ...] = ()

    def __init__(self, bus: Bus, folder: Path, recipe_yaml: str, bulk_url: str = "") -> None:
        self.run = bus.run
        self.folder = folder
        self.recipe_yaml = recipe_yaml
        self._bus = bus
        self._bulk_url = bulk_url

    async def cut(self) -> Cut:
        """Up to where the streams are consistent with each other."""
        return await cut_of(self)

    async def info(self, stream: Stream) -> StreamInfo:
        """What the stream holds."""
        with self._told():
            return await self._bus.info(stream)

    async def read(self, stream: Stream, start: int = 1, stop: int | None = None) -> AsyncGenerator[Entry, None]:
        """The entries with `start <= seq < stop` that are there now, in order."""
        end = (await self.info(stream)).last_seq + 1
        end = end if stop is None else min(end, stop)
        if self._bulk_url:
            entries = bulk.read(self._bulk_url, self.run, stream, start, end)
        else:
            entries = read_to_end(self._bus, stream, start, end)
        with self._told():
            async with contextlib.aclosing(entries):
                async for entry in entries:
                    yield entry

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        """The entries at these sequences, in this order."""
        with self._told():
            return await self._bus.get(stream, seqs)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A server that cannot be reached is something to mend, and no bug of whoever reads."""
        try:
            yield
        except BusUnavailable as error:
            raise UserError(f"The log of run {self.run} cannot be read: {error}.", "Is its server well?") from None


@contextlib.asynccontextmanager
async def open_log(target: str | None) -> AsyncIterator[LogSource]:
    """The log that a person means: a recording's file, a run's folder or name, by default the newest run.

    The server of a run that has ended is started on its store for as long as the log is open.

    Raises:
        UserError: there is no such run, or it cannot be read.
    """
    if target is not None and is_recording(target):
        with open_recording(Path(target)) as recording:
            yield recording
        return
    folder = find_folder(target)
    where = locate(folder, None, None)
    async with server_of(folder, where.url) as url:
        bus = JetStreamBus(where.run, url, "reader")
        await bus.connect()
        try:
            if not await bus.exists():
                raise UserError(f"The server holds no run {where.run}.", "Was it purged? Then nothing can be read.")
            bulk_url = url if await asyncio.to_thread(bulk.usable, url) else ""
            log = RunLog(bus, folder, "", bulk_url)
            log.recipe_yaml = await newest_recipe(log.read(CONTROL))
            yield log
        finally:
            await bus.close()


def is_recording(target: str) -> bool:
    """Whether a person means a file, there or not, and not a run."""
    return Path(target).is_file() or (target.endswith(SUFFIX) and not Path(target).exists())


def initial_model_of(source: LogSource, folder: Path) -> Path:
    """The folder of version 0 (config, tokenizer, weights): the run's own, or that of a recording put into `folder`.

    Raises:
        UserError: there is none.
    """
    if isinstance(source, Recording):
        return source.extract_model(folder)
    assert isinstance(source, RunLog)
    path = initial_model(source.folder)
    if not path.is_dir():
        raise UserError(f"The run in {source.folder} has no initial model: {path} is not there.", "Was it deleted?")
    return path


async def newest_recipe(controls: AsyncIterator[Entry]) -> str:
    """The recipe of the newest start; empty if there is none."""
    recipe = ""
    async for entry in controls:
        with contextlib.suppress(MalformedMessage):
            message = entry.message()
            if isinstance(message, Control) and message.action == "start":
                recipe = message.recipe
    return recipe


@contextlib.asynccontextmanager
async def server_of(folder: Path, url: str) -> AsyncIterator[str]:
    """The URL of a server that holds the run: the one that runs, or one of our own on the run's store.

    Whoever started the one that runs may end before we do: the run, or another reader of one that has ended. Then one
    of our own takes its place, on its port, where clients look for it by themselves.
    """
    if url_of(folder) is None:
        yield url
        return
    server = NatsServer()
    standing_by: asyncio.Task[None] | None = None
    try:
        own = await _joined(server, folder)
        standing_by = asyncio.create_task(_stand_by(server, folder), name="stands by for the server")
        yield own
    finally:
        if standing_by is not None:
            standing_by.cancel()
            await asyncio.gather(standing_by, return_exceptions=True)
        await server.stop()


async def _joined(server: NatsServer, folder: Path) -> str:
    """The URL of the folder's server, which is started if none runs. Raises `UserError`."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        if in_use(folder) and time.monotonic() < deadline_s:
            own = url_of(folder)
            if own is not None and await asyncio.to_thread(_answers, own):
                return own
        else:
            try:
                return await server.start(folder)
            except UserError:
                if not in_use(folder) or time.monotonic() > deadline_s:
                    raise  # else another reader was faster
        await asyncio.sleep(LOOK_S)


async def _stand_by(server: NatsServer, folder: Path) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        if not in_use(folder):
            with contextlib.suppress(UserError):  # another reader was faster
                await server.start(folder)


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 4222), timeout=1.0).close()
    except OSError:
        return False
    return True
