"""What only a real server shows: kills, restarts, full streams, refusals, and the order of its checks."""

import asyncio
import dataclasses
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from bus import table
from bus.jetstream import JetStreamBus, parse_beat
from bus.port import BusFull, BusUnavailable, Entry
from bus.publish import Window
from bus.shell import serve
from bus.table import PROMPTS, ROLLOUT_WORKERS, ROLLOUTS, stream_name
from ops.nats_server import NatsServer
from schemas import Message, UserError
from tests.bus.samples import connected, fetch_until, groups, kill_and_restart, prompt, rollout, take


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[JetStreamBus]:
    bus = await connected(server.url)
    yield bus
    await bus.close()


async def test_everything_acknowledged_survives_a_kill_of_the_server(bus: JetStreamBus, server: NatsServer) -> None:
    """The one promise on which all recovery rests. Publishes that the kill interrupts are retried until stored."""
    stored: dict[int, int] = {}

    async def publish(group: int) -> None:
        stored[group] = (await bus.publish(rollout(group, tokens=2000))).seq

    publishing = asyncio.gather(*(publish(group) for group in range(1500)))
    while len(stored) < 200:
        await asyncio.sleep(0.001)
    assert len(stored) < 1500
    await kill_and_restart(server)
    async with asyncio.timeout(20):
        await publishing
    entries = await take(bus.read(ROLLOUTS), 1500)
    assert {entry.seq: entry.sample for entry in entries} == {seq: (group, 0) for group, seq in stored.items()}
    assert (await bus.info(ROLLOUTS)).messages == 1500


async def test_a_reader_resumes_soon_after_a_kill_and_sees_each_entry_once(
    bus: JetStreamBus, server: NatsServer
) -> None:
    """A push consumer of the client took 3.5 s, a watch 19 s: actors would miss a weight version that long."""
    seen: list[int] = []
    heard = asyncio.Event()

    async def read() -> None:
        async for entry in bus.read(PROMPTS):
            seen.append(entry.seq)
            heard.set()

    reading = asyncio.create_task(read())
    for group in range(300):
        await bus.publish(prompt(group))
    await kill_and_restart(server)
    back_s = asyncio.get_running_loop().time()
    heard.clear()
    await bus.publish(prompt(300))
    async with asyncio.timeout(20):
        while len(seen) < 301:
            await asyncio.sleep(0.005)
    # About 0.2 s on an idle machine. Less than the client's 3.5 s, and than the 4 s (pull.SILENCE_S) after which a
    # reader would ask again that had not noticed the new connection.
    assert asyncio.get_running_loop().time() - back_s < 3.4
    for group in range(301, 320):
        await bus.publish(prompt(group))
    async with asyncio.timeout(20):
        while len(seen) < 320:
            await asyncio.sleep(0.005)
    assert seen == list(range(1, 321))
    reading.cancel()


async def test_a_reader_goes_on_when_its_consumer_is_deleted(bus: JetStreamBus) -> None:
    """An administrator may do it, and the server itself does it to idle readers."""
    entries = bus.read(PROMPTS)
    await bus.publish(prompt(0))
    assert [entry.seq for entry in await take(entries, 1)] == [1]
    name = stream_name(bus.run, PROMPTS)
    for consumer in (await bus._api(f"CONSUMER.NAMES.{name}"))["consumers"]:
        if consumer.startswith("reader-"):
            await bus._api(f"CONSUMER.DELETE.{name}.{consumer}")
    await bus.publish(prompt(1))
    assert [entry.seq for entry in await take(entries, 1)] == [2]


async def test_a_reader_that_ends_leaves_no_consumer_behind(bus: JetStreamBus) -> None:
    entries = bus.read(PROMPTS)
    await bus.publish(prompt(0))
    await take(entries, 1)
    await entries.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        while (await bus._api(f"CONSUMER.NAMES.{stream_name(bus.run, PROMPTS)}"))["consumers"] != ["rollout"]:
            await asyncio.sleep(0.01)


async def test_a_reader_gets_past_the_bound_on_bytes(bus: JetStreamBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large answers end a request before its count does; the reader must ask again."""
    monkeypatch.setattr("bus.pull.READ_WINDOW_BYTES", 100_000)
    await asyncio.gather(*(bus.publish(rollout(group, tokens=2000)) for group in range(60)))
    assert [entry.seq for entry in await take(bus.read(ROLLOUTS), 60)] == list(range(1, 61))


async def test_whoever_waits_learns_that_the_connection_was_closed(bus: JetStreamBus, server: NatsServer) -> None:
    """The server may close it for good, e.g. after a change of credentials; the actor must end, to be started anew."""
    other = JetStreamBus("run", server.url)
    await other.connect()
    reading = asyncio.create_task(anext(other.read(PROMPTS)))
    async with other.subscribe(ROLLOUT_WORKERS) as subscription:
        fetching = asyncio.create_task(subscription.fetch(1, 60.0))
        await asyncio.sleep(0.1)
        await other.close()
        async with asyncio.timeout(20):
            for waiting in (reading, fetching):
                with pytest.raises(BusUnavailable, match="closed"):
                    await waiting


async def test_workers_lose_nothing_over_kills_of_the_server(bus: JetStreamBus, server: NatsServer) -> None:
    """Fetch, handle, publish and acknowledge, with two kills in between: each prompt ends in exactly one rollout."""
    stop = asyncio.Event()
    queue = dataclasses.replace(ROLLOUT_WORKERS, ack_wait_s=1.0)

    async def handle(message: Message, delivery: Any) -> list[Message]:
        await asyncio.sleep(0.002)
        return [rollout(delivery.entry.sample[0])]

    for group in range(400):
        await bus.publish(prompt(group))
    workers = [
        asyncio.create_task(serve(bus, queue, handle, room=lambda: 4, stop=stop, name=f"w{n}")) for n in range(2)
    ]
    for goal in (50, 200):
        while (await bus.info(ROLLOUTS)).messages < goal:
            await asyncio.sleep(0.005)
        await kill_and_restart(server, down_s=0.1)
    async with asyncio.timeout(20):
        while (backlog := await bus.backlog(queue)).pending or backlog.ack_pending:
            await asyncio.sleep(0.02)
    stop.set()
    await asyncio.gather(*workers)
    entries = await take(bus.read(ROLLOUTS), 400)
    assert sorted(entry.sample for entry in entries if entry.sample) == [(group, 0) for group in range(400)]


async def test_a_waiting_fetch_survives_a_restart(bus: JetStreamBus, server: NatsServer) -> None:
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        waiting = asyncio.create_task(subscription.fetch(5, 60.0))
        await asyncio.sleep(0.05)
        await kill_and_restart(server, down_s=0.1)
        await bus.publish(prompt(1))
        async with asyncio.timeout(40):
            assert groups(await waiting) == [1]


async def test_a_broken_connection_leaves_no_message_in_a_dead_pull(server: NatsServer) -> None:
    """The server still holds the old request when the client comes back, and must not answer it to nobody."""
    bus = await connected(server.url, ack_wait_s=60.0)
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        assert await subscription.fetch(5, 0.05) == []
        bus._connection._client._transport.close()  # type: ignore[union-attr]
        await asyncio.sleep(0.05)
        assert await bus._connection.until_up(20.0)
        await asyncio.sleep(1.0)  # what the server sends into the dead socket meanwhile comes after the ack wait only
        await asyncio.gather(*(bus.publish(prompt(group)) for group in range(5)))
        assert sorted(groups(await fetch_until(subscription, 5))) == [0, 1, 2, 3, 4]
    await bus.close()


async def publish_until_refused(bus: JetStreamBus, make: Callable[[int], Message]) -> None:
    async with asyncio.timeout(20):
        for group in range(1000):
            await bus.publish(make(group))


async def test_a_full_stream_says_so_and_stores_again_after_a_purge(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never silent loss, never a retry for two minutes."""
    small = dataclasses.replace(PROMPTS, bytes_max=20_000)
    monkeypatch.setattr("bus.jetstream.STREAMS", (small, *table.STREAMS[1:]))
    bus = await connected(server.url)
    with pytest.raises(BusFull, match=r"maximum bytes exceeded.*purge"):
        await publish_until_refused(bus, prompt)
    stored = (await bus.info(PROMPTS)).last_seq
    assert stored > 10
    with pytest.raises(BusFull):
        await bus.publish_fenced([prompt(5000), prompt(5001)], stored)
    info = await bus.info(PROMPTS)
    assert info.last_seq == stored
    await bus.purge(PROMPTS, stored // 2)
    assert (await bus.publish(prompt(stored))).seq == stored + 1
    await bus.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root can mount a small file system")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


async def test_a_full_disk_is_told_and_a_restart_mends_it(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers nothing after a failed write; a worker must not wait for it until its deadline."""
    monkeypatch.setattr("bus.publish.PUBLISH_TIMEOUT_S", 0.2)
    server = NatsServer()
    bus = await connected(await server.start(tiny_disk))
    filler = tiny_disk / "filler"
    filler.write_bytes(bytes(4_000_000))
    with pytest.raises(BusFull, match=r"no space left.*start the NATS server again"):
        await publish_until_refused(bus, lambda group: rollout(group, tokens=20_000))
    stored = (await bus.info(ROLLOUTS)).last_seq
    assert stored > 1
    filler.unlink()
    await server.restart()
    assert (await bus.publish(rollout(stored, tokens=20_000))).seq == stored + 1
    await bus.close()
    await server.stop()


async def test_a_frozen_server_stores_each_message_once(
    bus: JetStreamBus, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts time out and are repeated while the first ones still lie in the socket."""
    monkeypatch.setattr("bus.publish.PUBLISH_TIMEOUT_S", 0.2)
    os.kill(server.pid, signal.SIGSTOP)
    publishing = asyncio.gather(*(bus.publish(prompt(group)) for group in range(50)))
    await asyncio.sleep(0.8)
    os.kill(server.pid, signal.SIGCONT)
    async with asyncio.timeout(20):
        acks = await publishing
    assert sorted(ack.seq for ack in acks) == list(range(1, 51))
    assert (await bus.info(PROMPTS)).messages == 50


async def test_a_message_may_be_larger_than_the_window_of_bytes() -> None:
    window = Window(2, 100)
    async with asyncio.timeout(20):
        await window.enter(1000)
    waiting = asyncio.create_task(window.enter(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    window.leave(1000)
    await waiting
    await window.enter(99)
    third = asyncio.create_task(window.enter(1))
    cancelled = asyncio.create_task(window.enter(1))
    await asyncio.sleep(0)
    assert not third.done()
    cancelled.cancel()
    window.leave(99)
    await third
    window.leave(1)
    window.leave(1)
    async with asyncio.timeout(20):
        await window.enter(100)  # nothing leaked


async def test_an_unreachable_server_is_named_with_the_remedy(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bus.connection.CONNECT_TIMEOUT_S", 0.5)
    url = server.url
    await server.stop()
    bus = JetStreamBus("run", url)
    with pytest.raises(UserError) as caught:
        async with asyncio.timeout(20):
            await bus.connect()
    text = str(caught.value)
    assert "127.0.0.1:" in text
    assert "Is it running" in text
    password = url.rpartition("@")[0].rpartition(":")[2]
    assert password not in text


async def test_wrong_credentials_are_refused_at_once(server: NatsServer) -> None:
    address = server.url.rpartition("@")[2]
    for url in (f"nats://{address}", f"nats://rs:wrong@{address}"):
        bus = JetStreamBus("run", url)
        with pytest.raises(UserError, match=r"refused us.*user:password"):
            async with asyncio.timeout(20):
                await bus.connect()


async def test_a_server_with_small_messages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Better at the start than at the first long answer, where the server would cut the connection."""
    monkeypatch.setattr("ops.nats_server.PAYLOAD_MAX", "1MB")
    server = NatsServer()
    bus = JetStreamBus("run", await server.start(tmp_path))
    with pytest.raises(UserError, match="max_payload: 8MB"):
        await bus.connect()
    await server.stop()


async def test_a_run_that_was_not_set_up_is_unavailable(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.publish.PUBLISH_DEADLINE_S", 0.3)
    monkeypatch.setattr("bus.pull.PUBLISH_DEADLINE_S", 0.3)
    bus = JetStreamBus("nothing", server.url)
    await bus.connect()
    assert not await bus.exists()
    with pytest.raises(BusUnavailable, match="set up"):
        await bus.publish(prompt(1))
    with pytest.raises(BusUnavailable):
        await bus.info(PROMPTS)
    with pytest.raises(BusUnavailable):
        await anext(bus.read(PROMPTS))
    await bus.close()


async def test_a_closed_connection_is_unavailable_at_once(bus: JetStreamBus) -> None:
    await bus.close()
    async with asyncio.timeout(20):
        with pytest.raises(BusUnavailable):
            await bus.publish(prompt(1))
    await bus.beat({"actor": "late"})  # never raises


async def test_a_publish_gives_up_at_its_deadline(
    bus: JetStreamBus, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bus.publish.PUBLISH_DEADLINE_S", 0.3)
    os.kill(server.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        with pytest.raises(BusUnavailable):
            await bus.publish(prompt(1))


async def test_malformed_beats_are_ignored(bus: JetStreamBus) -> None:
    """Anybody on the server may write there; a dashboard must not die of it."""
    beats = bus.beats()
    heard = asyncio.create_task(anext(beats))
    await asyncio.sleep(0.05)
    for junk in (b"", b"\xc1", b"\xdd\xff\xff\xff\xff", msgpack.packb([1]), msgpack.packb({1: 2}), b"\x81" * 5000):
        assert parse_beat(junk) is None
        await bus._connection.send(table.beats_subject(bus.run), junk)
    await bus.beat({"unsendable": object()})
    await bus.beat({"actor": "a"})
    async with asyncio.timeout(20):
        assert await heard == {"actor": "a"}
    await beats.aclose()  # type: ignore[attr-defined]


async def test_runs_share_a_server(server: NatsServer) -> None:
    one, two = await connected(server.url, "one"), await connected(server.url, "one-more")
    await one.publish(prompt(1))
    assert (await one.info(PROMPTS)).messages == 1
    assert (await two.info(PROMPTS)).messages == 0
    await one.close()
    await two.close()


async def test_get_answers_over_a_restart(bus: JetStreamBus, server: NatsServer) -> None:
    for group in range(100):
        await bus.publish(rollout(group, tokens=1000))
    getting = asyncio.create_task(bus.get(ROLLOUTS, list(range(1, 101)) * 20))
    await asyncio.sleep(0.02)
    await kill_and_restart(server, down_s=0.1)
    async with asyncio.timeout(20):
        entries: list[Entry] = await getting
    assert [entry.seq for entry in entries] == list(range(1, 101)) * 20
