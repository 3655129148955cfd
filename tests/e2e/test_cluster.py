"""A run on a NATS cluster goes on when a server dies and stays dead: what replicas are for."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bus import jetstream
from bus.jetstream import JetStreamBus
from bus.table import CONSUMERS, CONTROL, STEPS, STREAMS, stream_name
from ops.nats_cluster import NatsCluster
from ops.nats_server import NatsServer
from schemas import Control, UserError
from tests.e2e.harness import Launched, assert_sound, read_all
from tests.e2e.partition import leader_of_steps

pytestmark = pytest.mark.e2e

STEPS_OF_RUN = 14
# Servers elect a new leader 4 to 9 seconds after the old one fell silent, a pull that was lost with it is noticed after
# another 4 (pull.SILENCE_S), and then a step is to be done, on two cores that five actors, three servers and other
# tests share; alone it takes 6 s. Well below the 120 s after which publishers give up (PUBLISH_DEADLINE_S) and actors
# are started anew: that would be no going on.
GAP_MAX_S = 40.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[NatsCluster]:
    """Three servers that nobody starts again."""
    cluster = NatsCluster()
    asyncio.run(cluster.start(tmp_path / "cluster"))
    yield cluster
    asyncio.run(cluster.stop())


def test_a_run_goes_on_when_the_server_that_leads_its_streams_dies_for_good(
    nodes: NatsCluster, launch: Callable[..., Launched]
) -> None:
    run = launch(f"steps={STEPS_OF_RUN}", "bus.replicas=3", options=("--nats", nodes.url))
    run.until_step(3)
    leader = asyncio.run(leader_of_steps(nodes.url, run.folder.name))
    os.kill(nodes.pids[leader], signal.SIGKILL)
    run.until_step(5)
    assert leader not in nodes.pids
    assert run.ends() == 0, run.output
    assert_sound(run.folder, STEPS_OF_RUN)
    (steps,) = read_all(run.folder, STEPS)
    times = [step.metrics["time"] for step in steps]  # type: ignore[attr-defined]
    gap_s = max(after - before for before, after in itertools.pairwise(times))
    print(f"longest time without a step: {gap_s:.1f} s")
    assert gap_s < GAP_MAX_S


async def test_everything_is_kept_by_as_many_servers_as_are_asked_for_and_a_client_moves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams and consumers alike: a consumer on one server only would stop the run with it."""
    cluster = NatsCluster()
    url = await cluster.start(tmp_path)
    bus = JetStreamBus("run", url)
    await bus.connect()
    await bus.setup(replicas=3)
    for stream in STREAMS:
        answer = await bus._api(f"STREAM.INFO.{stream_name('run', stream)}")
        assert len(answer["cluster"]["replicas"]) == 2, stream.name
    for consumer in CONSUMERS:
        answer = await bus._api(f"CONSUMER.INFO.{stream_name('run', consumer.stream)}.{consumer.name}")
        assert len(answer["cluster"]["replicas"]) == 2, consumer.name
    # A retry may come while the servers still agree on the first try: then they refuse it, for the moment.
    acks = await asyncio.gather(*(bus.publish(Control(action="resume", nonce="a")) for _ in range(8)))
    assert {ack.seq for ack in acks} == {1}

    monkeypatch.setattr(jetstream, "CREATE_DEADLINE_S", 0.5)  # by now they have found each other
    other = JetStreamBus("other", url)
    await other.connect()
    with pytest.raises(UserError, match="5 replicas") as caught:
        await other.setup(replicas=5)
    await other.close()
    assert "bus.replicas" in caught.value.remedy

    connected = bus._connection._client.connected_url
    assert connected is not None
    (mine,) = [s for s in cluster.servers if s.url.endswith(f":{connected.port}")]
    await mine.stop()
    assert (await bus.publish(Control(action="pause", nonce="a"))).seq == 2
    assert (await bus.info(CONTROL)).messages == 2
    await bus.close()
    await cluster.stop()


async def test_replicas_on_a_single_server_are_refused_with_the_remedy(tmp_path: Path) -> None:
    server = NatsServer()
    bus = JetStreamBus("run", await server.start(tmp_path))
    await bus.connect()
    with pytest.raises(UserError, match="3 replicas") as caught:
        await bus.setup(replicas=3)
    assert "bus.replicas" in caught.value.remedy
    await bus.close()
    await server.stop()
