"""Replay, trace, diff and audit read through one door: what stands behind it must make no difference."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus.jetstream import JetStreamBus
from bus.port import BusUnavailable, Entry
from bus.table import PARTIALS, PROMPTS, ROLLOUTS
from ops import log_source
from ops.invariants import READ_ORDER
from ops.log_source import LogSource, initial_model_of, open_log, server_of
from ops.nats_server import NatsServer, in_use
from ops.record import main as record_main
from ops.recording.reader import Recording
from schemas import UserError
from tests.ops.sound_log import RUN, stored_run, whole_run


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """A run folder whose server is up, with a sound log and an initial model."""
    folder = tmp_path / RUN
    (folder / "initial").mkdir(parents=True)
    (folder / "initial" / "config.json").write_text("{}")
    server = NatsServer()
    bus = await stored_run(folder, server)
    await bus.close()
    yield folder
    await server.stop()


async def all_of(log: LogSource) -> dict[str, list[Entry]]:
    return {stream.name: [entry async for entry in log.read(stream)] for stream in READ_ORDER}


async def test_a_run_and_its_recording_read_alike_whatever_reads_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bulk, through the client, and from the file."""
    file = tmp_path / "a.rollstream"
    assert await record_main(str(folder), file, with_model=True) == 0
    async with open_log(str(folder)) as log:
        in_bulk = await all_of(log)
        assert sum(map(len, in_bulk.values())) == sum(map(len, whole_run().entries.values()))
        assert [e async for e in log.read(ROLLOUTS, 3, 6)] == in_bulk["rollouts"][2:5]
        assert [e async for e in log.read(PARTIALS, 2)] == []
        assert await log.get(PROMPTS, [4, 2]) == [in_bulk["prompts"][3], in_bulk["prompts"][1]]
        assert (log.run, log.damage) == (RUN, ())
        assert initial_model_of(log, tmp_path / "unused") == folder / "initial"
    async with open_log(str(file)) as log:
        assert isinstance(log, Recording)
        assert await all_of(log) == in_bulk
        assert await log.get(PROMPTS, [4, 2]) == [in_bulk["prompts"][3], in_bulk["prompts"][1]]
    monkeypatch.setattr("bus.bulk.usable", lambda url: False)
    monkeypatch.setattr("bus.bulk.read", None)
    async with open_log(str(folder)) as log:
        assert await all_of(log) == in_bulk
        assert [e async for e in log.read(ROLLOUTS, 3, 6)] == in_bulk["rollouts"][2:5]
        assert [e async for e in log.read(ROLLOUTS, 1, 1)] == []


async def test_a_log_that_cannot_be_read_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: object) -> AsyncIterator[Entry]:
        raise BusUnavailable("it is gone")
        yield

    monkeypatch.setattr(log_source.bulk, "read", broken)
    with pytest.raises(UserError, match="The log of run audited cannot be read: it is gone"):
        async with open_log(str(folder)) as log:
            await all_of(log)


async def test_a_run_without_its_model_or_its_log_is_told(folder: Path, tmp_path: Path) -> None:
    (folder / "initial" / "config.json").unlink()
    (folder / "initial").rmdir()
    async with open_log(str(folder)) as log:
        with pytest.raises(UserError, match="has no initial model"):
            initial_model_of(log, tmp_path / "model")
    told = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**told, "run": "another"}))
    with pytest.raises(UserError, match="The server holds no run another"):
        async with open_log(str(folder)):
            pass


@pytest.mark.parametrize("target", ["nowhere", "nowhere.rollstream"])
async def test_what_is_not_there_is_told(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"There is no run 'nowhere'|nowhere.rollstream cannot be read: No such file"):
        async with open_log(target):
            pass


async def test_readers_of_an_ended_run_share_its_server_and_outlive_whoever_started_it(tmp_path: Path) -> None:
    """The second one was refused while the first one's server came up, or lost it in the midst."""
    folder = tmp_path / RUN
    server = NatsServer()
    await server.start(folder)
    await server.stop()
    async with contextlib.AsyncExitStack() as first, contextlib.AsyncExitStack() as second:
        urls = await asyncio.gather(*(stack.enter_async_context(server_of(folder, "")) for stack in (first, second)))
        assert urls[0] == urls[1]
        bus = JetStreamBus(RUN, urls[0], "reader")
        await bus.connect()
        for last in (first, second):  # one of them started the server
            async with server_of(folder, "") as url:
                await last.aclose()
                assert (url, await bus.exists()) == (urls[0], False)
        await bus.close()
    assert not in_use(folder)


@pytest.mark.parametrize("secret", ["run.json", "nats/url"])
async def test_the_run_of_another_user_is_told(folder: Path, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files hold the password, so nobody else may read them."""
    read_text = Path.read_text

    def guarded(self: Path, *args: str | None) -> str:
        if self == (folder / secret).resolve():
            raise PermissionError(13, "Permission denied")
        return read_text(self, *args)

    monkeypatch.setattr(Path, "read_text", guarded)
    with pytest.raises(UserError, match=f"{secret} cannot be read: Permission denied"):
        async with open_log(str(folder)):
            pass


async def test_a_broken_run_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        async with open_log(str(tmp_path)):
            pass
