"""A bug is met again only on the same log: the same bytes and headers, at the same sequences, on a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus.jetstream import JetStreamBus
from bus.port import Entry
from bus.reading import read_to_end
from bus.restore import Restorer
from bus.table import PROMPTS, REWARD_WORKERS, ROLLOUT_WORKERS, ROLLOUTS, SCORED, STEPS, Stream
from ops.audit import audit_run
from ops.log_source import LogSource, open_log
from ops.nats_server import NatsServer
from ops.replay.into_bus import REPLAYED, main, merged, parse_speed, parse_streams
from ops.replay.into_bus import lay_down as lay
from schemas import UserError
from tests.bus.samples import fetch_until
from tests.ops.recorded_run import STEPS as STEPS_DONE
from tests.ops.recorded_run import altered

EVERYTHING = (0.0, float("inf"), STEPS_DONE)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer()
    await server.start(tmp_path / "server")
    yield server
    await server.stop()


@pytest.fixture
async def fresh(server: NatsServer) -> AsyncIterator[JetStreamBus]:
    """A run that has just been set up."""
    bus = JetStreamBus("fresh", server.url)
    await bus.connect()
    await bus.setup()
    yield bus
    await bus.close()


async def all_of(source: LogSource | JetStreamBus, stream: Stream) -> list[Entry]:
    read = read_to_end(source, stream) if isinstance(source, JetStreamBus) else source.read(stream)
    return [entry async for entry in read]


def shown(entry: Entry) -> tuple[int, str, bytes, dict[str, str]]:
    return entry.seq, entry.key, entry.data, dict(entry.headers)


async def test_a_fresh_run_holds_equal_bytes_at_equal_sequences_and_is_sound(recorded: Path, tmp_path: Path) -> None:
    """By the command, on a private server; then as any other run of a folder."""
    folder = tmp_path / "fresh"
    assert await main(str(recorded), folder, None, None, "max", 0, None, None, False) == 0
    async with open_log(str(recorded)) as source, open_log(str(folder)) as replayed:
        for stream in REPLAYED:
            old, new = await all_of(source, stream), await all_of(replayed, stream)
            if stream.newest_only:  # what was replaced meanwhile is not in a recording, so places differ
                old = [dataclasses.replace(entry, seq=0) for entry in old]
                new = [dataclasses.replace(entry, seq=0) for entry in new]
            assert list(map(shown, new)) == list(map(shown, old)), stream.name
        assert (await replayed.info(STEPS)).messages == STEPS_DONE
    audit = await audit_run(folder)
    assert audit.clean, audit.to_json()
    assert audit.report.ended
    with pytest.raises(UserError, match="is not empty"):
        await main(str(recorded), folder, None, None, "max", 0, None, None, False)


async def test_workers_that_join_find_only_what_is_open(recorded: Path, tmp_path: Path, server: NatsServer) -> None:
    """Their queues are no part of the log; without this they would generate and score the whole run again."""
    folder = tmp_path / "half"
    assert await main(str(recorded), folder, server.url, "half", "max", 0, 2, None, False) == 0
    bus = JetStreamBus("half", server.url)
    await bus.connect()
    try:
        answered = {entry.id for entry in await all_of(bus, ROLLOUTS)}
        unanswered = [entry.seq for entry in await all_of(bus, PROMPTS) if entry.id not in answered]
        scored = {entry.id for entry in await all_of(bus, SCORED)}
        unscored = [entry.seq for entry in await all_of(bus, ROLLOUTS) if entry.id not in scored]
        assert (await bus.info(STEPS)).messages == 2
        for consumer, stream, left in ((ROLLOUT_WORKERS, PROMPTS, unanswered), (REWARD_WORKERS, ROLLOUTS, unscored)):
            last = (await bus.info(stream)).last_seq
            assert (await bus.backlog(consumer)).pending == (last - min(left) + 1 if left else 0)
            async with bus.subscribe(consumer) as subscription:
                given = await fetch_until(subscription, last - min(left) + 1 if left else 0)
                assert set(left) <= {delivery.entry.seq for delivery in given}
    finally:
        await bus.close()
    audit = await audit_run(folder)
    assert audit.clean, audit.to_json()
    assert not audit.report.ended
    with pytest.raises(UserError, match="holds a run half already"):
        await main(str(recorded), tmp_path / "again", server.url, "half", "max", 0, None, None, False)


async def test_entries_come_at_the_pace_that_is_asked_for(
    recorded: Path, server: NatsServer, fresh: JetStreamBus
) -> None:
    """Some bugs are races, so the pauses are part of the recording."""
    async with open_log(str(recorded)) as source:
        entries = [entry async for entry in merged(source, REPLAYED)]
        times = [entry.time_s for entry in entries]
        middle = times[len(times) // 2]
        pace = (times[-1] - middle) / 0.6  # the second half shall take 0.6 s, the first none
        began, began_s = time.monotonic(), time.time()
        span = (middle, float("inf"), STEPS_DONE)
        count = await lay(source, "fresh", server.url, span, REPLAYED, pace, 6.0, asyncio.Event())
    assert time.monotonic() - began >= 0.6
    assert count == len(entries)
    stored = [entry.time_s for entry in await all_of(fresh, STEPS)]
    old = [entry.time_s for entry in entries if entry.stream is STEPS]
    due = [began_s + max(0.0, time_s - middle) / pace for time_s in old]
    assert [place for place, time_s in enumerate(stored) if time_s < due[place] - 0.01] == [], (
        "none comes before its time"
    )


async def test_streams_are_merged_by_the_brokers_clock(recorded: Path) -> None:
    async with open_log(str(recorded)) as source:
        entries = [entry async for entry in merged(source, REPLAYED)]
        times = [entry.time_s for entry in entries]
        assert times == sorted(times)
        for stream in REPLAYED:
            assert [e.seq for e in entries if e.stream is stream] == [e.seq for e in await all_of(source, stream)]


async def test_what_was_purged_leaves_its_place_free(recorded: Path, server: NatsServer, fresh: JetStreamBus) -> None:
    """Batches name rollouts by sequence, so a log without its beginning must begin where it did."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    log.purge(ROLLOUTS.name, 5)
    await lay(log, "fresh", server.url, EVERYTHING, REPLAYED, None, 6.0, asyncio.Event())
    assert list(map(shown, await all_of(fresh, ROLLOUTS))) == list(map(shown, await all_of(log, ROLLOUTS)))
    assert (await fresh.info(ROLLOUTS)).first_seq == 5


async def test_a_gap_is_told_and_not_closed(recorded: Path, server: NatsServer, fresh: JetStreamBus) -> None:
    """Entries behind it would stand at other sequences than those that batches name."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    log.drop(ROLLOUTS.name, 5)
    with pytest.raises(UserError, match="Entry 6 of the rollouts cannot be laid down at its place"):
        await lay(log, "fresh", server.url, EVERYTHING, (ROLLOUTS,), None, 6.0, asyncio.Event())


async def test_laying_down_survives_a_restart_of_the_server(
    recorded: Path, server: NatsServer, fresh: JetStreamBus
) -> None:
    """Acknowledgements are lost with the connection: what is stored must not be stored again behind its place."""
    async with open_log(str(recorded)) as source:
        entries = [entry async for entry in merged(source, REPLAYED)]
        restorer = Restorer("fresh", server.url)
        await restorer.connect()
        for number, entry in enumerate(entries):
            await restorer.put(entry)
            if number == len(entries) // 2:
                await server.restart()
        await restorer.flush()
        await restorer.close()
        for stream in (PROMPTS, ROLLOUTS, SCORED, STEPS):
            assert list(map(shown, await all_of(fresh, stream))) == list(map(shown, await all_of(source, stream)))


def test_speeds_and_streams_are_read_or_refused() -> None:
    assert (parse_speed("1"), parse_speed("0.5"), parse_speed("max")) == (1.0, 0.5, None)
    for wrong in ("0", "-1", "fast", "inf", "nan"):
        with pytest.raises(UserError, match="is no speed"):
            parse_speed(wrong)
    assert parse_streams("scored, prompts") == (PROMPTS, SCORED)
    assert parse_streams(None) == REPLAYED
    with pytest.raises(UserError, match="no stream 'leases'"):
        parse_streams("prompts,leases")
