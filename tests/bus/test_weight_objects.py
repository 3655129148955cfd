"""Workers that do not see the weights directory have only this road: what comes over it must be what was put."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from pathlib import Path

import pytest

from bus.port import BusFull, BusUnavailable
from bus.weights import WeightsCorrupt, WeightsMissing, WeightStore, objects
from bus.weights.objects import CHUNK_BYTES, PARTS, ObjectRoad
from bus.weights.wire import Wire
from schemas import UserError
from tests.bus.published_weights import Published
from tests.bus.samples import kill_and_restart

_runs = itertools.count()


@pytest.fixture
def road(server_url: str) -> ObjectRoad:
    return ObjectRoad(server_url, f"objects-{next(_runs)}")


@pytest.mark.parametrize("nbytes", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 9 * CHUNK_BYTES - 5])
def test_what_was_put_is_got(road: ObjectRoad, nbytes: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    road.put("v000001-0a0b0c0d.safetensors", content)
    assert road.get("v000001-0a0b0c0d.safetensors") == content


def test_putting_again_replaces_and_stores_nothing_twice(road: ObjectRoad) -> None:
    """A trainer that was killed in the midst of it puts the same file once more."""
    content = random.Random(0).randbytes(5 * CHUNK_BYTES + 1)
    road.put("a", content[::-1])
    road.put("a", content)
    assert road.get("a") == content
    with contextlib.closing(Wire(road._url)) as wire:
        answers = [wire.request(f"$JS.API.STREAM.INFO.{road._stream(part)}") for part in range(PARTS)]
    assert sum(answer["state"]["messages"] for answer in answers) == 6 + 1


def test_a_file_that_was_never_put_whole_is_missing(road: ObjectRoad, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightsMissing, match=r"bus\.weights=both"):
        road.get("a")  # there is not even a stream
    road.put("b", b"b")
    send = objects._send_part

    def killed_before_its_end(wire: Wire, subject: str, content: memoryview, only: str = "") -> None:
        if only:
            raise KeyboardInterrupt
        send(wire, subject, content)

    monkeypatch.setattr(objects, "_send_part", killed_before_its_end)
    with pytest.raises(KeyboardInterrupt):
        road.put("a", bytes(3 * CHUNK_BYTES))
    with pytest.raises(WeightsMissing, match="holds no a"):
        road.get("a")
    assert road.get("b") == b"b"


def test_what_is_no_longer_needed_is_deleted(road: ObjectRoad) -> None:
    road.collect(set())  # nothing was put yet
    for name in ("v1.safetensors", "v2.on1.delta", "v3.on2.delta"):
        road.put(name, name.encode())
    road.collect({"v1.safetensors", "v3.on2.delta"})
    assert road.get("v3.on2.delta") == b"v3.on2.delta"
    with pytest.raises(WeightsMissing):
        road.get("v2.on1.delta")


async def test_a_restart_of_the_server_in_the_midst_costs_time_only(server, monkeypatch: pytest.MonkeyPatch) -> None:
    road = ObjectRoad(server.url, "restarted")
    content = random.Random(1).randbytes(24 * CHUNK_BYTES)
    monkeypatch.setattr(objects, "RETRY_S", 0.05)
    road.put("first", b"first")
    putting = asyncio.create_task(asyncio.to_thread(road.put, "a", content))
    await asyncio.sleep(0.02)
    await kill_and_restart(server)
    await putting
    getting = asyncio.create_task(asyncio.to_thread(road.get, "a"))
    await asyncio.sleep(0.02)
    await kill_and_restart(server)
    assert await getting == content


def test_a_server_that_is_gone_is_told_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "DEADLINE_S", 0.1)
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1"):
        ObjectRoad("nats://me:secret@127.0.0.1:1", "gone").put("a", b"a")


def test_a_server_that_refuses_us_says_what_to_do(server_url: str) -> None:
    wrong = server_url.replace("@", "x@") if "@" in server_url else server_url.replace("//", "//nobody:nothing@")
    with pytest.raises(UserError, match="refused us"):
        ObjectRoad(wrong, "refused").put("a", b"a")


async def test_a_worker_without_the_directory_joins_late_and_gets_exact_weights(
    road: ObjectRoad, tmp_path: Path
) -> None:
    published = Published(tmp_path, road=road)
    published.publish(range(9))
    reader = published.reader(tmp_path / "cache", road, WeightStore(tmp_path / "not mounted"))
    for version in (7, 8, 5):
        assert (await reader.fetch(published.events[version])).path.read_bytes() == published.contents[version]
    reader.close()


@pytest.mark.parametrize("damage", ["other bytes", "gone"])
@pytest.mark.parametrize("version", [5, 6, 7])
async def test_what_was_tampered_with_on_the_server_is_refused(
    road: ObjectRoad, tmp_path: Path, version: int, damage: str
) -> None:
    published = Published(tmp_path, road=road)
    published.publish(range(8))
    path = published.events[version].path
    if damage == "gone":
        road.collect({event.path for event in published.events.values()} - {path})
    else:
        content = bytearray(road.get(path))
        content[len(content) // 2] ^= 1
        road.put(path, content)
    reader = published.reader(tmp_path / "cache", road, WeightStore(tmp_path / "not mounted"))
    with pytest.raises(WeightsMissing if damage == "gone" else WeightsCorrupt, match=f"version {version}|{path[:7]}"):
        await reader.fetch(published.events[7])


async def test_a_server_without_room_for_the_streams_is_told_at_once(tmp_path: Path) -> None:
    """One that somebody else runs may allow less than the streams reserve; trying again for a minute mends nothing."""
    from ops import nats_server

    with pytest.MonkeyPatch.context() as small:
        small.setattr(nats_server, "FILE_STORE_BYTES_MAX", 1 << 20)
        server = nats_server.NatsServer()
        road = ObjectRoad(await server.start(tmp_path), "a-run")
    try:
        async with asyncio.timeout(30):
            with pytest.raises(BusFull, match="max_file_store"):
                await asyncio.to_thread(road.put, "a", b"a")
    finally:
        await server.stop()
