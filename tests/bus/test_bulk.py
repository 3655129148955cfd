"""The bulk reader is a second way to the same log: whatever the port reads, it must read alike, and quicker."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import pytest

from bus import bulk
from bus.jetstream import JetStreamBus
from bus.port import BusUnavailable, Entry
from bus.table import DEAD, PARTIALS, PROMPTS, ROLLOUTS, Stream, stream_name
from ops.nats_server import NatsServer
from schemas import Control, UserError
from tests.bus.samples import connected, kill_and_restart, partial, prompt, rollout, take

RUN = "run"


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[JetStreamBus]:
    bus = await connected(server.url)
    yield bus
    await bus.close()


async def in_bulk(server: NatsServer, stream: Stream, start: int = 1, stop: int = 1 << 40) -> list[Entry]:
    return [entry async for entry in bulk.read(server.url, RUN, stream, start, stop)]


async def publish_prompts(bus: JetStreamBus, count: int) -> None:
    await bus.publish_fenced([prompt(group) for group in range(count)], 0)


async def test_it_reads_what_the_port_reads(bus: JetStreamBus, server: NatsServer) -> None:
    """Every kind of entry: fenced and not, keyed with gaps, dead letters, no headers, no bytes."""
    await publish_prompts(bus, 2500)
    for group in range(20):
        await bus.publish(rollout(group, tokens=1 + 40 * group))
        await bus.publish(partial(group % 7, group + 1))
    for entry in await take(bus.read(PROMPTS), 3):
        await bus.dead_letter(entry, "a reason: with a colon, µ and ✓")
    await bus._connection.send(f"rs.{RUN}.rollouts", b"bare")
    await bus._connection.send(f"rs.{RUN}.rollouts", b"", headers={"Empty": "", "Odd": " a: b "})
    await bus.publish(rollout(99))
    for stream, count in ((PROMPTS, 2500), (ROLLOUTS, 23), (PARTIALS, 7), (DEAD, 3)):
        want = await take(bus.read(stream), count)
        assert await in_bulk(server, stream) == want
        last = want[-1].seq
        for start, stop in ((1, 1), (2, 3), (last, last + 1), (last + 1, last + 5), (3, last), (last - 1, last + 9)):
            assert await in_bulk(server, stream, start, stop) == [e for e in want if start <= e.seq < stop]


async def test_an_empty_stream_ends_at_once(bus: JetStreamBus, server: NatsServer) -> None:
    async with asyncio.timeout(20):
        assert await in_bulk(server, PROMPTS) == []


async def test_messages_of_megabytes_come_whole(bus: JetStreamBus, server: NatsServer) -> None:
    sizes = [7_900_000, 1, 3_000_000, 900_000, 7_000_000, 20]
    for size in sizes:
        await bus.publish(Control(action="start", nonce="a" * (size % 90 + 1), recipe="x" * min(size, 1 << 20)))
        await bus._store(ROLLOUTS, "", b"y" * size, {"Nats-Msg-Id": str(size)})
    assert [len(entry.data) for entry in await in_bulk(server, ROLLOUTS)] == sizes


async def test_a_kill_of_the_server_costs_a_batch_and_no_entry(bus: JetStreamBus, server: NatsServer) -> None:
    """An audit of an hour shall not begin again because the server did."""
    await publish_prompts(bus, 5000)
    seqs: list[int] = []
    async for entry in bulk.read(server.url, RUN, PROMPTS, 1, 5001):
        seqs.append(entry.seq)
        if len(seqs) in (100, 3000):
            await kill_and_restart(server, down_s=0.1)
    assert seqs == list(range(1, 5001))


async def test_a_reader_that_pauses_goes_on_though_the_server_has_forgotten_it(
    bus: JetStreamBus, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay at the speed of the recording asks once in minutes."""
    monkeypatch.setattr(bulk, "READER_GONE_S", 0.2)
    await publish_prompts(bus, 5000)
    seqs: list[int] = []
    async for entry in bulk.read(server.url, RUN, PROMPTS, 1, 5001):
        seqs.append(entry.seq)
        if len(seqs) == 1500:
            await asyncio.sleep(1.5)
    assert seqs == list(range(1, 5001))


async def test_it_leaves_no_consumer_behind(bus: JetStreamBus, server: NatsServer) -> None:
    """Whether it read to the end, stopped in the midst, or was cancelled while it waited."""
    await publish_prompts(bus, 3000)
    await in_bulk(server, PROMPTS)
    async with contextlib.aclosing(bulk.read(server.url, RUN, PROMPTS, 1, 3001)) as entries:
        assert (await anext(entries)).seq == 1
    reading = asyncio.ensure_future(in_bulk(server, PROMPTS))
    await asyncio.sleep(0.005)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    async with asyncio.timeout(20):
        while (await bus._api(f"CONSUMER.NAMES.{stream_name(RUN, PROMPTS)}"))["consumers"] != ["rollout"]:
            await asyncio.sleep(0.01)


async def test_a_wrong_password_is_told_at_once(server: NatsServer) -> None:
    url = server.url.replace("@", "x@")
    with pytest.raises(UserError, match="refused us: Authorization Violation"):
        _ = [entry async for entry in bulk.read(url, RUN, PROMPTS, 1, 2)]


async def test_a_server_that_is_gone_is_told_after_the_deadline(
    bus: JetStreamBus, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "DEADLINE_S", 0.3)
    await bus.publish(prompt(0))
    url = server.url
    await bus.close()
    await server.stop()
    with pytest.raises(BusUnavailable, match="RS_run_prompts cannot be read from 1 on"):
        _ = [entry async for entry in bulk.read(url, RUN, PROMPTS, 1, 2)]
    assert not bulk.usable(url)


async def test_only_one_plain_server_is_read_in_bulk(server: NatsServer) -> None:
    """With TLS, or several servers to try, the port reads."""
    assert bulk.usable(server.url)
    assert not bulk.usable(server.url.replace("nats://", "tls://"))
    assert not bulk.usable(f"{server.url},{server.url}")


async def test_a_server_that_talks_nonsense_neither_hangs_nor_crashes_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated lines, lengths that lie, other protocols: all end as unavailable, by the deadline."""
    monkeypatch.setattr(bulk, "DEADLINE_S", 0.02)
    monkeypatch.setattr(bulk, "SILENCE_S", 0.1)
    rng = random.Random(3)
    hello = b'INFO {"headers":true}\r\n'
    created = hello + b"MSG _INBOX.a.0 1 2\r\n{}\r\n"
    answers = [
        b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"INFO {\r\n", hello, hello + b"-ERR 'Stale Connection'\r\n",
        created + b"HMSG rs.run.prompts 1 $JS.ACK.a.b.1.1.1.1.0 99999999999 99999999999\r\n",
        created + b"HMSG rs.run.prompts 1 $JS.ACK.a.b.1.1.1.1.0 -5 3\r\n",
        created + b"MSG rs.run.prompts 1 x 3\r\nabc\r\n",
        created + b"HMSG rs.run.prompts 1 $JS.ACK.a.b.1.x.1.1.0 12 13\r\nNATS/1.0\r\n\r\nx\r\n", created + b"\r\n" * 9,
        created + b"HMSG _INBOX.a.1 1 30 30\r\nNATS/1.0 409 Consumer Deleted\r\n",
        hello + b"MSG _INBOX.a.0 1 9\r\nnot JSON!\r\n", hello + b"MSG _INBOX.a.0 1 4\r\nnull\r\n", b"INFO []\r\n",
        *(created + rng.randbytes(200) for _ in range(10)),
    ]  # fmt: skip

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(current)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as fake:
        url = f"nats://127.0.0.1:{fake.sockets[0].getsockname()[1]}"
        for current in answers:  # noqa: B007  # the fake server answers it
            began = time.monotonic()
            with pytest.raises(BusUnavailable):
                _ = [entry async for entry in bulk.read(url, RUN, PROMPTS, 1, 5)]
            assert time.monotonic() - began < 10.0
