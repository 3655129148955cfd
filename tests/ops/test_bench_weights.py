"""A machine joins with what it can reach: the run's folder, or the server; or its user is told what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bus.jetstream import JetStreamBus
from bus.memory import MemoryBus, MemoryHub
from bus.port import Entry
from bus.table import Stream
from ops.nats_server import NatsServer
from ops.recipe import Recipe, load_recipe
from ops.weights import INITIAL, folder_here, reader_of, road_of, writer_of
from schemas import UserError, encode
from tests.bus.published_weights import Published, weights

RECIPE = Path(__file__).parents[2] / "recipes" / "running_total.yaml"


def recipe(*overrides: str) -> Recipe:
    return load_recipe(RECIPE, overrides)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder, with what is needed of it here."""
    (tmp_path / "run" / "initial").mkdir(parents=True)
    (tmp_path / "run" / "initial" / "config.json").write_text("{}")
    return tmp_path / "run"


async def test_a_folder_that_is_seen_is_used_where_it_is(folder: Path) -> None:
    assert await folder_here(MemoryBus("run", MemoryHub()), recipe("bus.weights=both"), folder, "rollout") == folder


async def test_a_machine_that_cannot_have_the_weights_is_told_both_remedies(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not see the run's folder") as caught:
        await folder_here(MemoryBus("run", MemoryHub()), recipe(), tmp_path / "gone", "rollout")
    assert "Mount it" in str(caught.value.remedy)
    assert "bus.weights=both" in str(caught.value.remedy)


async def test_over_the_bus_come_the_initial_model_and_the_versions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = NatsServer()
    url = await server.start(tmp_path / "server")
    try:
        bus = JetStreamBus("far", url)
        await bus.connect()
        both = recipe("bus.weights=both")
        with pytest.raises(UserError, match="has not sent the initial model"):
            await folder_here(bus, both, tmp_path / "gone", "rollout")
        with pytest.raises(UserError, match="Mount it here") as caught:
            await folder_here(bus, both, tmp_path / "gone", "trainer")
        assert "bus.weights" not in str(caught.value)
        writer = writer_of(bus, both, folder)
        event = writer.publish(writer.snapshot(0, weights(0)))
        writer.collect(0, set())
        here = await folder_here(bus, both, tmp_path / "gone", "rollout")
        assert here == Path("runs/far")
        assert (here / "initial" / "config.json").read_text() == "{}"
        assert await folder_here(bus, both, tmp_path / "gone", "rollout") == here
        reader = reader_of(bus, both, here)
        assert (await reader.fetch(event)).path.read_bytes() == (folder / "weights" / event.path).read_bytes()
        reader.close()
        road = road_of(bus, both)
        assert road is not None
        assert road.get(INITIAL)
        await bus.close()
    finally:
        await server.stop()


class Known(JetStreamBus):
    """A run whose versions are known without its server."""

    def __init__(self, url: str, published: Published) -> None:
        super().__init__("a-run", url)
        self.published = published

    async def get(self, stream: Stream, seqs: Sequence[int]) -> list[Entry]:
        return [Entry(stream, seq, "", {}, encode(self.published.events[seq - 1])) for seq in seqs]


async def test_two_runs_of_one_name_on_a_host_leave_each_other_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are on two servers. What is old for the one may be what a worker of the other is about to open."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders = [tmp_path / "one" / "a-run", tmp_path / "two" / "a-run"]
    runs = [Published(folder) for folder in folders]
    for published in runs:
        published.publish(range(4))
    young, old = (
        reader_of(Known(f"nats://rs:secret@127.0.0.1:{4000 + place}", published), recipe(), folder)
        for place, (published, folder) in enumerate(zip(runs, folders, strict=True))
    )
    path = (await young.fetch(runs[0].events[1])).path
    for version in (2, 3):
        made = (await old.fetch(runs[1].events[version])).path
    assert path.read_bytes() == runs[0].contents[1]
    other = reader_of(Known("nats://rs:other@127.0.0.1:4001", runs[1]), recipe(), folders[1])
    assert (await other.fetch(runs[1].events[3])).path == made
    for reader in (young, old, other):
        reader.close()
    assert not list(path.parents[1].iterdir())
