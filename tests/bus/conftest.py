"""Both logs, for one suite: a real nats-server (one a module, one run a test) and the log in memory."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bus.jetstream import JetStreamBus
from bus.memory import MemoryBus, MemoryHub
from bus.port import Bus
from ops.nats_server import NatsServer
from tests.bus.samples import ACK_WAIT_S, NewClient

_runs = itertools.count()


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = NatsServer()
    yield asyncio.run(server.start(tmp_path_factory.mktemp("run")))
    asyncio.run(server.stop())


@pytest.fixture
def ack_wait_s() -> float:
    """Parametrised by tests that must not mistake a redelivery for something else."""
    return ACK_WAIT_S


@pytest.fixture(params=["jetstream", "memory"])
async def new_client(request: pytest.FixtureRequest, server_url: str, ack_wait_s: float) -> AsyncIterator[NewClient]:
    """Makes connected clients of one run that has been set up."""
    run = f"t{next(_runs)}"
    hub = MemoryHub()
    clients: list[Bus] = []

    async def new() -> Bus:
        if request.param == "memory":
            bus: Bus = MemoryBus(run, hub)
        else:
            bus = JetStreamBus(run, server_url)
        await bus.connect()
        clients.append(bus)
        return bus

    await (await new()).setup(ack_wait_s=ack_wait_s)
    yield new
    for client in clients:
        await client.close()


@pytest.fixture
async def bus(new_client: NewClient) -> Bus:
    return await new_client()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server of the test's own, to be killed."""
    server = NatsServer()
    await server.start(tmp_path)
    yield server
    await server.stop()
