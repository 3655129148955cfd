"""A recording stands for a run when the run is gone: what was in the log must be in it, to the last byte."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from bus.port import StreamInfo
from bus.table import CONTROL, DROPPED, LEASES, PARTIALS, PROMPTS, ROLLOUTS, STEPS, Stream
from ops.audit import audit_log, main
from ops.invariants import READ_ORDER
from ops.log_source import initial_model_of, open_log
from ops.progress import Progress
from ops.record import record
from ops.recording import reader
from ops.recording.cut import Cut
from ops.recording.format import HEAD, pack_head
from ops.recording.reader import Recording, open_recording
from schemas import Control, UserError
from tests.ops.recordings import MODEL, all_of, make_recording, places_of
from tests.ops.sound_log import RUN, Log, LogInLists, whole_run


async def test_all_entries_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = whole_run()
    path = await make_recording(tmp_path / "a.rollstream", monkeypatch, log)
    entries, damage = await all_of(path)
    assert damage == ()
    assert entries == {(name, entry.seq): entry for name, all_ in log.entries.items() for entry in all_}


async def test_a_recording_is_a_log_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay, trace and diff know one way to read; the recording must answer as the run would have."""
    source = LogInLists(whole_run())
    path = await make_recording(tmp_path / "a.rollstream", monkeypatch)
    async with open_log(str(path)) as log:
        assert (log.run, log.recipe_yaml, log.damage) == (RUN, source.recipe_yaml, ())
        assert await log.cut() == await source.cut()
        for stream in READ_ORDER:
            want = await source.info(stream)
            got = await log.info(stream)
            assert (got.first_seq, got.last_seq, got.messages) == (want.first_seq, want.last_seq, want.messages)
            for start in range(1, want.last_seq + 2):
                for stop in (None, start, start + 1, start + 3, want.last_seq + 9):
                    ours = [entry async for entry in log.read(stream, start, stop)]
                    assert ours == [entry async for entry in source.read(stream, start, stop)]
        assert await log.get(ROLLOUTS, [9, 2, 3, 2]) == await source.get(ROLLOUTS, [9, 2, 3, 2])
        for seqs in ([0], [1, 99], [-1]):
            with pytest.raises(LookupError, match="rollouts of run audited holds nothing at sequence"):
                await log.get(ROLLOUTS, seqs)
        assert await log.info(LEASES) == StreamInfo(1, 0, 0, 0)
        assert [entry async for entry in log.read(LEASES)] == []
        assert (await audit_log(log)).clean


async def test_a_range_is_read_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of one sample must not unpack a hundred gigabytes."""
    path = await make_recording(tmp_path / "a.rollstream", monkeypatch)
    read: list[int] = []
    with open_recording(path) as recording:
        load = reader.read_block
        monkeypatch.setattr(reader, "read_block", lambda *args: (read.append(args[2].number), load(*args))[1])
        entries = [entry async for entry in recording.read(ROLLOUTS, 4, 6)]
        await recording.get(ROLLOUTS, [4, 5, 4])
    assert [entry.seq for entry in entries] == [4, 5]
    holding = {place.block.number for place in places_of(path) if place.block.name == "rollouts"}
    assert set(read) < holding
    assert len(read) <= 4  # two blocks at most, each once by `read` and once by `get`


async def test_the_initial_model_comes_back_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaying needs version 0; on another machine there is nothing but the file."""
    path = await make_recording(tmp_path / "a.rollstream", monkeypatch)
    target = tmp_path / "out" / "model"
    target.mkdir(parents=True)
    (target / "of_before").touch()
    async with open_log(str(path)) as log:
        assert initial_model_of(log, target) == target
    assert {file.name: file.read_bytes() for file in target.iterdir()} == MODEL
    assert [file.name for file in target.parent.iterdir()] == ["model"]


async def test_without_a_model_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = await make_recording(tmp_path / "a.rollstream", monkeypatch, with_model=False)
    async with open_log(str(path)) as log:
        with pytest.raises(UserError, match="holds no initial model"):
            initial_model_of(log, tmp_path / "model")


class Growing(LogInLists):
    """A run that goes on: after the cut, and between the streams, more is written."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.log = log

    async def cut(self) -> Cut:
        cut = await super().cut()
        self.log.put(self.log.entries["dropped"][0].message())
        self.log.put(self.log.entries["steps"][0].message())
        self.log.remove(PARTIALS, 1)  # a newer prefix has taken its place
        return cut


async def test_a_run_that_goes_on_is_recorded_up_to_one_cut(tmp_path: Path) -> None:
    """Else a step would be in the file whose batch is not, and the audit would accuse a sound run."""
    log = whole_run()
    want = {name: len(entries) for name, entries in log.entries.items()}
    await record(Growing(log), tmp_path / "a.rollstream", None)
    async with open_log(str(tmp_path / "a.rollstream")) as recording:
        got = {stream.name: (await recording.info(stream)).messages for stream in READ_ORDER}
        assert got == {**want, "partials": 0}
        assert got["steps"] == len(log.entries["steps"]) - 1
        assert got["dropped"] == len(log.entries["dropped"]) - 1
        assert (await audit_log(recording)).clean


async def test_sequences_that_are_not_there_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that keeps the newest of each key has gaps by its nature."""
    log = whole_run()
    partial = log.entries["partials"][0].message()
    for _ in range(5):
        log.put(partial)
    for seq in (1, 3, 6):
        log.remove(PARTIALS, seq)
    entries, damage = await all_of(await make_recording(tmp_path / "a.rollstream", monkeypatch, log))
    assert damage == ()
    assert [seq for name, seq in entries if name == "partials"] == [2, 4, 5]


async def test_an_entry_larger_than_a_block_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    for size in (1, 100_000, 1):
        log.put(Control(action="start", nonce="a", recipe="x" * size))
    path = await make_recording(tmp_path / "a.rollstream", monkeypatch, log)
    entries, damage = await all_of(path)
    assert (len(entries), damage) == (3, ())


async def test_a_run_that_is_stopped_in_the_midst_of_it_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C cancels: half a file under the final name would be taken for a recording."""

    class Endless(LogInLists):
        async def read(self, stream: Stream, start: int = 1, stop: int | None = None):  # type: ignore[no-untyped-def]
            while True:
                async for entry in super().read(PROMPTS):
                    yield entry
                await asyncio.sleep(0)

    task = asyncio.ensure_future(record(Endless(whole_run()), tmp_path / "a.rollstream", None))
    while not list(tmp_path.iterdir()):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(tmp_path.iterdir()) == []


async def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot be written: No space left on device\. Free some space"):
        await record(LogInLists(whole_run()), tmp_path / "a.rollstream", None)
    assert list(tmp_path.iterdir()) == []


async def test_a_file_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.rollstream"
    path.write_text("mine")
    with pytest.raises(UserError, match="exists and is left as it is"):
        await record(LogInLists(whole_run()), path, None)
    assert path.read_text() == "mine"


async def test_a_format_of_its_own_reader_is_read_by_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old recordings are read for ever: a new format adds a reader and leaves the old ones."""
    path = await make_recording(tmp_path / "a.rollstream", monkeypatch)
    path.write_bytes(pack_head(2) + path.read_bytes()[HEAD.size :])
    with pytest.raises(UserError, match=r"written in recording format 2; this Rollstream reads 1\. Upgrade Rollstream"):
        await main(str(path), as_json=False)

    class OfFormat2(Recording):
        pass

    monkeypatch.setitem(reader.READERS, 2, OfFormat2)
    with open_recording(path) as recording:
        assert type(recording) is OfFormat2
    path.write_bytes(pack_head(3) + path.read_bytes()[HEAD.size :])
    with pytest.raises(UserError, match="format 3; this Rollstream reads 1 to 2"), open_recording(path):
        pass


async def test_a_second_recording_of_a_recording_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops import record as command

    path = await make_recording(tmp_path / "a.rollstream", monkeypatch)
    with pytest.raises(UserError, match="is a recording already"):
        await command.main(str(path), None, with_model=True)


async def test_streams_that_were_never_written_to_are_empty(tmp_path: Path) -> None:
    await record(LogInLists(Log()), tmp_path / "a.rollstream", None)
    async with open_log(str(tmp_path / "a.rollstream")) as log:
        for stream in (CONTROL, DROPPED, STEPS):
            assert await log.info(stream) == StreamInfo(1, 0, 0, 0)
            assert [entry async for entry in log.read(stream)] == []


class OfAnotherTime(LogInLists):
    """A log whose program knew other streams than this one."""

    async def cut(self) -> Cut:
        cut = await super().cut()
        streams = {name: info for name, info in cut.streams.items() if name != "partials"}
        return Cut(cut.gated_seq, {**streams, "thoughts": StreamInfo(1, 7, 7, 70)})


async def test_streams_of_another_version_are_told_if_unknown_and_empty_if_not_there() -> None:
    """An audit that skipped in silence what it does not know would prove less than it says."""
    log = whole_run()
    log.remove(PARTIALS, 1)
    audit = await audit_log(OfAnotherTime(log))
    assert audit.report.clean
    assert audit.damage == ("it holds 7 thoughts, which this Rollstream does not know and has not checked",)
    assert not audit.clean


async def test_a_long_audit_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ops.progress.PLAIN_EVERY_S", 0.0)
    monkeypatch.setattr("ops.audit.LOOK_EVERY", 20)
    log = whole_run()
    total = sum(map(len, log.entries.values()))
    await audit_log(LogInLists(log), Progress("checking"))
    told = [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == [f"checking: {count} of {total}" for count in range(20, total + 1, 20)]
