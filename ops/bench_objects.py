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


async def measure_road(nbytes: int, rounds: int) -> list[list[Passage]]:
    """`rounds` of: raw loopback, a file with fsync, then put and get by the client and by the object road."""
    content = os.urandom(nbytes)
    return [await _round(content) for _ in range(rounds)]


async def _round(content: bytes) -> list[Passage]:
    async with _server() as (url, server):
        road = ObjectRoad(url, "bench")
        client = await nats.connect(url)
        store = await client.jetstream().create_object_store(BUCKET)

        async def client_get() -> None:
            received = io.BytesIO()
            await store.get("weights", writeinto=received)  # without it, joining the chunks is quadratic
            assert received.getbuffer() == content

        async def road_get() -> None:
            assert await asyncio.to_thread(road.get, "weights") == content

        plan: Sequence[tuple[str, Callable[[], Awaitable[object]]]] = (
            ("raw loopback", lambda: asyncio.to_thread(_loopback, content)),
            ("file and fsync", lambda: asyncio.to_thread(_file, content)),
            ("client put", lambda: store.put("weights", content)),
            ("client get", client_get),
            ("road put", lambda: asyncio.to_thread(road.put, "weights", content)),
            ("road get", road_get),
        )
        passages = []
        for what, work in plan:
            if what == "road put":
                await store.delete("weights")
            passages.append(await _timed(what, len(content), work, server))
        await client.close()
    return passages


async def _timed(what: str, nbytes: int, work: Callable[[], Awaitable[object]], server: psutil.Process) -> Passage:
    await asyncio.to_thread(os.sync)  # what others have written is not to be waited for
    began, own, of_server = time.monotonic(), time.process_time(), sum(server.cpu_times()[:2])
    await work()
    return Passage(
        what,
        nbytes,
        time.monotonic() - began,
        time.process_time() - own,
        sum(server.cpu_times()[:2]) - of_server,
    )


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
    """From one thread's memory to another's through a TCP connection of this machine."""
    received = memoryview(bytearray(len(content)))
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def receive() -> None:
            connection, _ = listening.accept()
            with connection:
                at = 0
                while at < len(received):
                    at += connection.recv_into(received[at:])

        receiver = threading.Thread(target=receive)
        receiver.start()
        with socket.create_connection(listening.getsockname()) as sending:
            sending.sendall(content)
            receiver.join()


def _file(content: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def report_road(rounds: Sequence[Sequence[Passage]]) -> list[str]:
    """The result as Markdown: the median of the rounds."""
    nbytes = rounds[0][0].nbytes
    by_name = {
        passage.what: sorted((round_[at] for round_ in rounds), key=lambda p: p.seconds)[len(rounds) // 2]
        for at, passage in enumerate(rounds[0])
    }
    lines = [
        f"{nbytes / 1e9:g} GB of random bytes, one server with file storage on this machine, medians of {len(rounds)} "
        f"rounds. The road has {PARTS} streams and connections, chunks of {CHUNK_BYTES >> 20} MiB and {WINDOW} of them "
        "on the way. The client's `get` is the one that writes into a buffer, `writeinto`; without it, it joins its "
        "chunks in quadratic time, and 1 GB takes over an hour.",
        "",
        "| | seconds | MB/s | CPU s, own | CPU s, server | times the client's |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for what, passage in by_name.items():
        client = by_name.get(what.replace("road", "client"), passage)
        times = f"**{client.seconds / passage.seconds:.1f}**" if what.startswith("road") else ""
        lines.append(
            f"| {what} | {passage.seconds:.2f} | {passage.mb_s:.0f} | {passage.own_cpu_s:.2f} | "
            f"{passage.server_cpu_s:.2f} | {times} |"
        )
    both = {who: by_name[f"{who} put"].seconds + by_name[f"{who} get"].seconds for who in ("client", "road")}
    lines.append(f"| put and get | {both['road']:.2f} | | | | **{both['client'] / both['road']:.1f}** |")
    return lines
