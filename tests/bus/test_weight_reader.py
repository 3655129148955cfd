"""A worker must get exactly the weights that were announced, or be told that it cannot; by whatever road they come."""

from __future__ import annotations

import errno
import random
from dataclasses import replace

import pytest

from bus.weights import WeightsCorrupt, WeightsError, WeightsMissing, WeightStore, cache
from bus.weights import tensors as safetensors
from schemas import UserError
from tests.bus.published_weights import Published, weights


@pytest.fixture
def published(tmp_path):
    made = Published(tmp_path)
    made.publish(range(9))
    return made


async def test_versions_are_full_or_deltas_as_their_numbers_say(published):
    kinds = {version: (event.kind, event.base) for version, event in published.events.items()}
    assert kinds == {v: ("full", -1) if v in (0, 5) else ("delta", v - 1) for v in range(9)}
    assert all(e.nbytes < published.events[0].nbytes / 4 for e in published.events.values() if e.kind == "delta")


async def test_a_worker_that_joins_at_7_with_full_versions_0_and_5_gets_exact_weights(published, tmp_path):
    reader = published.reader(tmp_path / "cache")
    path = (await reader.fetch(published.events[7])).path
    assert path.read_bytes() == published.contents[7]
    loaded, wanted = safetensors.load(path), weights(7)
    assert loaded.keys() == wanted.keys()
    assert all(loaded[name].equal(wanted[name]) for name in wanted)
    reader.close()
    assert not (tmp_path / "cache" / "a-run").exists()


async def test_a_worker_that_follows_reads_one_delta_a_version(published, tmp_path, monkeypatch):
    """The version before lies in the cache: the deltas before it are not read again."""
    reader = published.reader(tmp_path / "cache")
    read: list[str] = []
    verify = WeightStore.verify
    monkeypatch.setattr(WeightStore, "verify", lambda self, e: (read.append(e.path), verify(self, e))[1])
    for version in (6, 7, 8):
        assert (await reader.fetch(published.events[version])).path.read_bytes() == published.contents[version]
    assert [name[:7] for name in read] == ["v000006", "v000007", "v000008"]


async def test_workers_of_a_host_share_what_one_of_them_made(published, tmp_path):
    first, second = published.reader(tmp_path / "cache"), published.reader(tmp_path / "cache")
    path = (await first.fetch(published.events[7])).path
    for version in (6, 7):
        published.store.resolve(published.events[version].path).unlink()
    assert (await second.fetch(published.events[7])).path == path
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


async def test_full_files_are_used_where_they_lie(published, tmp_path):
    path = (await published.reader(tmp_path / "cache").fetch(published.events[5])).path
    assert path == published.store.resolve(published.events[5].path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("version", [5, 6, 7])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove", "swap"])
async def test_whatever_happens_to_a_file_of_the_chain_no_other_weights_come_of_it(
    published, tmp_path, version, damage
):
    path = published.store.resolve(published.events[version].path)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[random.Random(version).randrange(len(content))] ^= 4
    elif damage == "cut":
        del content[-7:]
    elif damage == "grow":
        content += b"\0"
    path.write_bytes(published.contents[4] if damage == "swap" else content)
    if damage == "remove":
        path.unlink()
    with pytest.raises(WeightsError, match=f"version {version}|{path.name}"):
        await published.reader(tmp_path / "cache").fetch(published.events[7])


async def test_a_worker_that_missed_a_damaged_delta_takes_the_next_full_version(published, tmp_path):
    published.publish([9, 10])
    published.store.resolve(published.events[8].path).unlink()
    reader = published.reader(tmp_path / "cache")
    for version in (8, 9):
        with pytest.raises(WeightsMissing, match="mount that directory"):
            await reader.fetch(published.events[version])
    assert (await reader.fetch(published.events[10])).path.read_bytes() == published.contents[10]


async def test_a_trainer_that_was_started_again_mends_its_newest_version(published, tmp_path):
    """It writes it in full, beside the delta that the log announces, and whoever holds that can go on from there."""
    published.store.resolve(published.events[6].path).unlink()
    published.writer.publish(published.writer.snapshot(7, weights(7)))
    assert (await published.reader(tmp_path / "a").fetch(published.events[7])).path.read_bytes() == published.contents[
        7
    ]
    assert (await published.reader(tmp_path / "b").fetch(published.events[8])).path.read_bytes() == published.contents[
        8
    ]


async def test_deltas_of_another_order_are_refused(published, tmp_path):
    """Their own digests are right; what they change is not what is at hand."""
    events = published.events
    events[7] = replace(events[7], path=events[8].path, digest=events[8].digest, nbytes=events[8].nbytes)
    with pytest.raises(WeightsCorrupt, match="does not lead from"):
        await published.reader(tmp_path / "cache").fetch(events[7])


async def test_a_log_that_announces_a_delta_of_a_later_version_is_refused(published, tmp_path):
    event = replace(published.events[7], base=8)
    with pytest.raises(WeightsMissing, match="as a delta of version 8"):
        await published.reader(tmp_path / "cache").fetch(event)


async def test_a_damaged_file_in_the_cache_is_made_again(published, tmp_path):
    """The folder of temporary files is nobody's promise."""
    reader = published.reader(tmp_path / "cache")
    path = (await reader.fetch(published.events[6])).path
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    assert (await reader.fetch(published.events[7])).path.read_bytes() == published.contents[7]
    assert not path.exists()


async def test_the_cache_keeps_two_versions_and_removes_what_killed_processes_left(published, tmp_path):
    (tmp_path / "cache" / "killed").mkdir(parents=True)
    (tmp_path / "cache" / "killed" / ".used").touch()
    reader = published.reader(tmp_path / "cache")
    for version in (6, 7, 8):
        await reader.fetch(published.events[version])
    assert sorted(path.name[:7] for path in (tmp_path / "cache" / "a-run").glob("v*")) == ["v000007", "v000008"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["a-run"]


async def test_a_full_disk_of_the_cache_is_told_with_its_folder_and_the_remedy(tmp_path, monkeypatch):
    """It is often a small one in memory, and another one than the run's, which has room enough."""

    def full(path, content, *, durable):
        raise OSError(errno.ENOSPC, "No space left on device")

    published = Published(tmp_path)
    published.publish(range(2))
    reader = published.reader(tmp_path / "cache")
    monkeypatch.setattr(cache, "write_whole", full)
    with pytest.raises(UserError, match=rf"The disk of {tmp_path / 'cache'}.* is full") as told:
        await reader.fetch(published.events[1])
    assert "TMPDIR" in told.value.remedy
    reader.close()
