"""Publishing overlaps training: the log must still say what was made, in order, and a crash must leave nothing half."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator

import pytest

from actors.trainer.config import PublishConfig, TrainerConfig
from actors.trainer.publisher import Publisher
from bus.memory import MemoryBus, MemoryHub
from bus.port import Fenced
from bus.table import STEPS, WEIGHTS
from bus.weights import Snapshot
from bus.weights.files import delta_name, digest_of, full_file
from schemas import StepDone, WeightVersion


class Writer:
    """Writes nothing; what it was asked is in `written`. It waits for `allowed`."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []  # (version, the one that it stands on)
        self.collected: list[tuple[int, set[int]]] = []
        self.allowed = threading.Event()
        self.allowed.set()
        self.error: Exception | None = None

    def snapshot(self, version: int, weights: dict[str, str]) -> Snapshot:
        return Snapshot(version, weights["w"].encode())

    def publish(self, snapshot: Snapshot, before: Snapshot | None = None) -> WeightVersion:
        assert self.allowed.wait(20)
        if self.error is not None:
            raise self.error
        self.written.append((snapshot.version, before.version if before else -1))
        full = full_file(snapshot.version, snapshot.digest, len(snapshot.content))
        if before is None:
            return full
        return WeightVersion(
            version=full.version,
            kind="delta",
            base=before.version,
            path=delta_name(full.version, full.digest, before.version),
            digest=digest_of(b"delta" + snapshot.content),
            nbytes=1,
            result=full.digest,
        )

    def collect(self, keep_from_version: int, keep: set[int]) -> list[int]:
        self.collected.append((keep_from_version, keep))
        return []


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus("a-run", MemoryHub())
    await bus.connect()
    await bus.setup()
    yield bus
    await bus.close()


def publisher(
    bus: MemoryBus, writer: Writer, published: int = -1, overlap: bool = True, delta: bool = True
) -> Publisher:
    config = TrainerConfig(keep_versions=2, publish=PublishConfig(overlap=overlap, delta=delta))
    return Publisher(bus, config, writer, published, lambda: {3})


async def publish(publisher: Publisher, versions: range) -> None:
    for version in versions:
        snapshot = await publisher.take(version, lambda version=version: {"w": f"weights {version}"})
        await publisher.announce(snapshot, done(version) if version else None)


def done(version: int) -> StepDone:
    return StepDone(step=version - 1, version=version, metrics={"loss": 1.0})


async def stored(bus: MemoryBus) -> list[WeightVersion]:
    count = (await bus.info(WEIGHTS)).last_seq
    return [entry.message() for entry in await bus.get(WEIGHTS, range(1, count + 1))]


@pytest.mark.parametrize("overlap", [True, False])
async def test_versions_are_announced_in_order_each_before_its_step(bus: MemoryBus, overlap: bool) -> None:
    writer = Writer()
    to_publish = publisher(bus, writer, overlap=overlap)
    await publish(to_publish, range(5))
    await to_publish.settled()
    events = await stored(bus)
    assert [(event.version, event.base) for event in events] == [(0, -1), (1, 0), (2, 1), (3, 2), (4, 3)]
    steps = [entry.message() for entry in await bus.get(STEPS, range(1, 5))]
    assert [(step.step, step.version) for step in steps] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert all(step.metrics.keys() == {"loss", "seconds_announcing"} for step in steps)
    assert writer.collected[-1] == (3, {0, 3})


async def test_without_deltas_the_weights_before_are_let_go(bus: MemoryBus) -> None:
    """They are as large as the model, and nothing would stand on them."""
    writer = Writer()
    to_publish = publisher(bus, writer, delta=False)
    taken = await to_publish.take(0, lambda: {"w": "weights 0"})
    left = weakref.ref(taken)
    await to_publish.announce(taken)
    del taken
    await publish(to_publish, range(1, 3))
    await to_publish.settled()
    gc.collect()
    assert left() is None
    assert writer.written == [(0, -1), (1, -1), (2, -1)]


async def test_training_goes_on_while_one_version_is_published_and_waits_with_the_second(bus: MemoryBus) -> None:
    writer = Writer()
    writer.allowed.clear()
    to_publish = publisher(bus, writer)
    await publish(to_publish, range(1))  # returns, though nothing is written
    taking = asyncio.create_task(to_publish.take(1, lambda: {"w": "weights 1"}))
    await asyncio.sleep(0.05)
    assert not taking.done()
    assert (await bus.info(WEIGHTS)).last_seq == 0
    writer.allowed.set()
    assert (await taking).version == 1
    assert (await bus.info(WEIGHTS)).last_seq == 1
    await to_publish.close()


async def test_weights_that_change_afterwards_are_published_as_they_were(bus: MemoryBus) -> None:
    """The next step changes them in place while they are encoded."""
    writer = Writer()
    writer.allowed.clear()
    weights = {"w": "weights 0"}
    to_publish = publisher(bus, writer)
    await to_publish.announce(await to_publish.take(0, lambda: weights))
    weights["w"] = "weights 1"
    writer.allowed.set()
    await to_publish.settled()
    assert [event.digest for event in await stored(bus)] == [digest_of(b"weights 0")]


async def test_what_keeps_a_version_from_being_published_reaches_the_trainer(bus: MemoryBus) -> None:
    """A trainer that waits for a batch would wait for ever: nobody generates for a version that was never announced."""
    writer = Writer()
    writer.error = OSError(28, "No space left on device")
    to_publish = publisher(bus, writer)
    await publish(to_publish, range(1))
    async with asyncio.timeout(30):
        await to_publish.failed.wait()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            await to_publish.settled()
    assert (await bus.info(WEIGHTS)).last_seq == 0
    await to_publish.close()


async def test_a_trainer_that_comes_back_publishes_nothing_twice_and_its_newest_version_whole(bus: MemoryBus) -> None:
    first = publisher(bus, Writer())
    await publish(first, range(4))
    await first.settled()
    events = await stored(bus)
    writer = Writer()
    again = publisher(bus, writer, published=3)
    await publish(again, range(2, 6))  # from its checkpoint, of version 2
    await again.settled()
    assert writer.written == [(3, -1), (4, 3), (5, 4)]
    assert (await stored(bus))[:4] == events
    assert [event.version for event in await stored(bus)] == list(range(6))


async def test_a_trainer_that_comes_to_other_weights_than_were_announced_is_fenced(bus: MemoryBus) -> None:
    first = publisher(bus, Writer())
    await publish(first, range(4))
    await first.settled()
    again = publisher(bus, Writer(), published=3)
    await again.announce(await again.take(3, lambda: {"w": "other weights"}))
    with pytest.raises(Fenced, match="version 3 was published with digest"):
        await again.settled()
    rival = publisher(bus, Writer(), published=2)  # it read the log before version 3 was there
    await rival.announce(await rival.take(3, lambda: {"w": "other weights"}))
    with pytest.raises(Fenced, match="another trainer is at work"):
        await rival.settled()
