"""The object road beside the client library's own object store, on one server, and beside what bounds both."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import psutil

from bus.weights.objects import CHUNK_BYTES, PARTS, WINDOW, ObjectRoad
from ops.nats_server import NatsServer

BUCKET = "bench"
ORDER = ("raw loopback", "file and fsync", "client put", "client get", "road put", "road get")
JOINED_NBYTES = (32_000_000, 64_000_000)


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """One way of `nbytes` through something: wall seconds, CPU seconds of this process, and of the server."""

    what: str
    nbytes: int
    seconds: float
    own_cpu_s: float
    server_cpu_s: float

    @property
    def mb_s(self) -> float:
        """Megabytes a second."""
        return self.nbytes / self.seconds / 1e6

    @property
    def cpu_s(self) -> float:
        """CPU seconds of both."""
        return self.own_cpu_s + self.server_cpu_s


async def measure_road(nbytes: int, rounds: int) -> list[list[Passage]]:
    """`rounds` of: raw loopback, a file with fsync, then put and get by the client and by the object road.

    The client and the road have a server of their own each, and take turns in who comes first.
    """
    content = os.urandom(nbytes)
    measured = []
    for number in range(rounds):
        limits = [
            await _timed("raw loopback", content, lambda: asyncio.to_thread(_loopback, content)),
            await _timed("file and fsync", content, lambda: asyncio.to_thread(_file, content, sync=True)),
        ]
        ways = [_client, _road] if number % 2 == 0 else [_road, _client]
        measured.append(limits + [passage for way in ways for passage in await way(content)])
    return measured


async def measure_joining(sizes: Sequence[int] = JOINED_NBYTES) -> list[Passage]:
    """The client's `get` without a buffer to write into, at sizes that it can bear, and the road's at these."""
    contents = [os.urandom(nbytes) for nbytes in sizes]
    joined = [passage for content in contents for passage in await _client(content, into_buffer=False)]
    return joined + [passage for content in contents for passage in await _road(content)]


async def _client(content: bytes, into_buffer: bool = True) -> list[Passage]:
    async with _server() as (url, server):
        client = await nats.connect(url)
        store = await client.jetstream().create_object_store(BUCKET)

        async def get() -> None:
            if into_buffer:
                received = io.BytesIO()
                await store.get("weights", writeinto=received)
                assert received.getbuffer() == content
            else:
                assert (await store.get("weights")).data == content

        put = await _timed("client put", content, lambda: store.put("weights", content), server)
        got = await _timed("client get", content, get, server)
        await client.close()
    return [put, got]


async def _road(content: bytes) -> list[Passage]:
    async with _server() as (url, server):
        road = ObjectRoad(url, BUCKET)

        async def get() -> None:
            assert await asyncio.to_thread(road.get, "weights") == content

        put = await _timed("road put", content, lambda: asyncio.to_thread(road.put, "weights", content), server)
        return [put, await _timed("road get", content, get, server)]


async def _timed(
    what: str, content: bytes, work: Callable[[], Awaitable[object]], server: psutil.Process | None = None
) -> Passage:
    """Timed once this machine has had the memory: a virtual one gets pages from its host when it first writes them."""
    await asyncio.to_thread(_file, content, sync=False)
    await asyncio.to_thread(os.sync)  # what others have written is not to be waited for
    began, own, of_server = time.monotonic(), time.process_time(), _cpu_s(server)
    await work()
    seconds, own_cpu_s = time.monotonic() - began, time.process_time() - own
    return Passage(what, len(content), seconds, own_cpu_s, _cpu_s(server) - of_server)


def _cpu_s(server: psutil.Process | None) -> float:
    return 0.0 if server is None else float(sum(server.cpu_times()[:2]))


@asynccontextmanager
async def _server() -> AsyncIterator[tuple[str, psutil.Process]]:
    server = NatsServer()
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder:
        url = await server.start(Path(folder))
        try:
            yield url, psutil.Process(server.pid)
        finally:
            await server.stop()


def _loopback(content: bytes) -> None:
    """From one thread's memory into a small buffer of another's, through a TCP connection of this machine."""
    buffer = bytearray(CHUNK_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def receive() -> None:
            connection, _ = listening.accept()
            with connection:
                left = len(content)
                while left:
                    left -= connection.recv_into(buffer)

        receiver = threading.Thread(target=receive)
        receiver.start()
        with socket.create_connection(listening.getsockname()) as sending:
            sending.sendall(content)
            receiver.join()


def _file(content: bytes, sync: bool) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def report_road(rounds: Sequence[Sequence[Passage]], joining: Sequence[Passage] = ()) -> list[str]:
    """The result as Markdown: the median of the rounds, and what the client's `get` takes without a buffer."""
    nbytes = rounds[0][0].nbytes
    passages = [passage for round_ in rounds for passage in round_]
    by_name = {what: _median([passage for passage in passages if passage.what == what]) for what in ORDER}
    lines = [
        f"{nbytes / 1e9:g} GB of random bytes over TCP on this machine, medians of {len(rounds)} rounds; the client "
        "and the road have a server with file storage of their own each, and take turns in who comes first. The road "
        f"has {PARTS} streams and connections, chunks of {CHUNK_BYTES >> 20} MiB and {WINDOW} of them on the way each. "
        "The client's `get` is the one that writes into a buffer, `writeinto`.",
        "",
        "| | seconds | MB/s | CPU s, own | CPU s, server | times the client's, in seconds | in CPU s |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for what, passage in by_name.items():
        client = by_name.get(what.replace("road", "client"), passage)
        times = f"**{client.seconds / passage.seconds:.1f}** | {client.cpu_s / passage.cpu_s:.1f}"
        lines.append(
            f"| {what} | {passage.seconds:.2f} | {passage.mb_s:.0f} | {passage.own_cpu_s:.2f} | "
            f"{passage.server_cpu_s:.2f} | {times if what.startswith('road') else ' | '} |"
        )
    clients, roads = ([by_name[f"{who} put"], by_name[f"{who} get"]] for who in ("client", "road"))
    seconds = sum(passage.seconds for passage in roads)
    times_s = sum(passage.seconds for passage in clients) / seconds
    times_cpu = sum(passage.cpu_s for passage in clients) / sum(passage.cpu_s for passage in roads)
    lines.append(
        f"| road, put and get | {seconds:.2f} | {2 * nbytes / seconds / 1e6:.0f} | | | **{times_s:.1f}** | "
        f"{times_cpu:.1f} |"
    )
    return lines + _report_joining(joining) if joining else lines


def _report_joining(passages: Sequence[Passage]) -> list[str]:
    lines = [
        "",
        "Without a buffer to write into, the client's `get` joins its chunks in quadratic time, so it was measured at "
        "sizes that it can bear, once each.",
        "",
        "| MB | client put, s | client get, s | road put, s | road get, s | put and get, times the client's |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for nbytes in sorted({passage.nbytes for passage in passages}):
        seconds = {passage.what: passage.seconds for passage in passages if passage.nbytes == nbytes}
        client, road = (sum(seconds[f"{who} {way}"] for way in ("put", "get")) for who in ("client", "road"))
        shown = " | ".join(f"{seconds[what]:.2f}" for what in ORDER if what in seconds)
        lines.append(f"| {nbytes / 1e6:.0f} | {shown} | **{client / road:.1f}** |")
    return lines


def _median(passages: Sequence[Passage]) -> Passage:
    return sorted(passages, key=lambda passage: passage.seconds)[len(passages) // 2]
