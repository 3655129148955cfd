"""One writer at a time, whatever acknowledgements are lost: how a real server fences, and how we live with it."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator

import pytest

from bus import table
from bus.connection import Connection, Incoming
from bus.jetstream import JetStreamBus
from bus.port import Fenced
from bus.table import PROMPTS
from ops.nats_server import NatsServer
from tests.bus.samples import connected, kill_and_restart, prompt, take


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[JetStreamBus]:
    bus = await connected(server.url)
    yield bus
    await bus.close()


async def test_fenced_messages_stand_once_after_a_kill_in_the_midst(bus: JetStreamBus, server: NatsServer) -> None:
    """Those stored before the kill, whose acknowledgements were lost, must not fence their own writer."""
    messages = [prompt(group) for group in range(2000)]
    writing = asyncio.create_task(bus.publish_fenced(messages, 0))
    while (await bus.info(PROMPTS)).messages < 100:
        await asyncio.sleep(0.001)
    assert not writing.done()
    await kill_and_restart(server, down_s=0.1)
    async with asyncio.timeout(20):
        assert await writing == 2000
    entries = await take(bus.read(PROMPTS), 2000)
    assert [entry.sample for entry in entries] == [(group, 0) for group in range(2000)]


class _DeafConnection(Connection):
    """Loses the replies of the first `deaf` publishes, as a connection does that breaks at the wrong moment."""

    deaf = 0

    def _take_reply(self, message: Incoming) -> None:
        if b'"seq"' in message.data and self.deaf > 0:
            self.deaf -= 1
            self._settle(message.subject.rpartition(".")[2], None)
        else:
            super()._take_reply(message)


async def deaf_bus(url: str, deaf: int, run: str = "run") -> JetStreamBus:
    bus = JetStreamBus(run, url)
    connection = _DeafConnection(url)
    bus._connection = bus._publisher._connection = connection
    await bus.connect()
    connection.deaf = deaf
    return bus


@pytest.mark.parametrize("deaf", [1, 2, 3])
async def test_a_lost_acknowledgement_does_not_fence_its_own_writer(
    bus: JetStreamBus, server: NatsServer, deaf: int
) -> None:
    """Server 2.15 refuses the retry as a wrong sequence, before it looks at the id."""
    writer = await deaf_bus(server.url, deaf)
    assert await writer.publish_fenced([prompt(0), prompt(1), prompt(2)], 0) == 3
    assert await writer.publish_fenced([prompt(3)], 3) == 4
    assert (await bus.info(PROMPTS)).messages == 4
    await writer.close()


async def test_a_writer_is_fenced_by_its_own_message_if_it_says_something_else_now(bus: JetStreamBus) -> None:
    """A controller that leads again after folding an old log decides anew what it had decided otherwise before."""
    await bus.publish_fenced([prompt(1)], 0)
    assert await bus.publish_fenced([prompt(1)], 0) == 1
    with pytest.raises(Fenced):
        await bus.publish_fenced([dataclasses.replace(prompt(1), seed=12345)], 0)


async def test_a_lost_acknowledgement_does_not_lose_a_lease(bus: JetStreamBus, server: NatsServer) -> None:
    holder = await deaf_bus(server.url, 1)
    revision = await holder.acquire("controller", "a", 5.0)
    assert revision is not None
    holder._connection.deaf = 1  # type: ignore[attr-defined]
    assert await holder.renew("controller", "a", revision, 5.0) is not None
    await holder.close()


async def test_a_lost_acknowledgement_stores_once(bus: JetStreamBus, server: NatsServer) -> None:
    writer = await deaf_bus(server.url, 2)
    ack = await writer.publish(prompt(1))
    assert (ack.seq, ack.duplicate) == (1, True)
    assert (await bus.info(PROMPTS)).messages == 1
    await writer.close()


async def test_the_server_checks_the_sequence_before_the_id(bus: JetStreamBus) -> None:
    """The finding on which `publish_fenced` rests; a server that behaves otherwise needs other code."""

    async def answer(message_id: str, expected: int) -> tuple[int, int, bool]:
        target = table.subject(bus.run, PROMPTS)
        headers = {"Nats-Msg-Id": message_id, "Nats-Expected-Last-Sequence": str(expected)}
        reply = await bus._connection.request(target, b"x", 2.0, headers)
        assert reply is not None
        body = json.loads(reply.data)
        return body.get("seq", 0), body.get("error", {}).get("err_code", 0), body.get("duplicate", False)

    assert await answer("a", 0) == (1, 0, False)
    assert await answer("a", 0) == (0, 10071, False)  # the retry of what was stored: a wrong sequence
    assert await answer("b", 1) == (2, 0, False)
    assert await answer("a", 2) == (1, 0, True)  # the right sequence, an old id: nothing stored, the old place
    assert await answer("c", 1) == (0, 10071, False)
    assert await answer("c", 2) == (3, 0, False)  # a refused message does not use up its id


async def test_a_fenced_writer_is_fenced_over_the_restart_of_the_server(bus: JetStreamBus, server: NatsServer) -> None:
    other = JetStreamBus("run", server.url)
    await other.connect()
    await bus.publish_fenced([prompt(0)], 0)
    await kill_and_restart(server, down_s=0.1)
    await other.publish_fenced([prompt(1)], 1)
    with pytest.raises(Fenced):
        await bus.publish_fenced([prompt(2)], 1)
    await other.close()
