"""A NATS cluster on this machine: what tests and `rollstream chaos --nodes 3` stand on, not what a lab runs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from ops.nats_server import Membership, NatsServer


class NatsCluster:
    """`nodes` servers that know each other, each with its store in a folder of its own below `folder`.

    `start`, then `supervise` as a task if those that die shall come back, `stop` at the end.
    """

    def __init__(self, nodes: int = 3) -> None:
        user, password, ports = f"rs-{secrets.token_hex(4)}", secrets.token_urlsafe(24), _free_ports(nodes)
        self.servers = [
            NatsServer(Membership(f"node-{i}", port, tuple(ports), user, password)) for i, port in enumerate(ports)
        ]

    @property
    def url(self) -> str:
        """All servers, separated by commas."""
        return ",".join(server.url for server in self.servers)

    @property
    def pids(self) -> dict[str, int]:
        """Node name to pid, of those that run."""
        return {f"node-{i}": server.pid for i, server in enumerate(self.servers) if server.pid}

    async def start(self, folder: Path) -> str:
        """Start all servers; returns the URL. They elect their leader meanwhile: the first request waits for it.

        Raises:
            UserError: one of them did not come up.
        """
        try:
            await asyncio.gather(*(server.start(folder / f"node-{i}") for i, server in enumerate(self.servers)))
        except BaseException:
            await self.stop()
            raise
        return self.url

    async def supervise(self) -> None:
        """Start again whoever dies or hangs, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for server in self.servers:
                tasks.create_task(server.supervise())

    async def stop(self) -> None:
        """End all servers."""
        await asyncio.gather(*(server.stop() for server in self.servers))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextlib.asynccontextmanager
async def cluster(folder: Path, nodes: int = 3) -> AsyncIterator[NatsCluster]:
    """A supervised cluster for the time of a block."""
    servers = NatsCluster(nodes)
    await servers.start(folder)
    supervising = asyncio.create_task(servers.supervise(), name="supervises the cluster")
    try:
        yield servers
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        await servers.stop()
