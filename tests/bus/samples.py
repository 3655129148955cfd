"""Messages, and small ways to read them, that the tests of the bus share."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias

import numpy as np

from bus.jetstream import JetStreamBus
from bus.port import Bus, Delivery, Entry, Subscription
from ops.nats_server import NatsServer
from schemas import Partial, Prompt, Rollout

ACK_WAIT_S = 0.6
WAIT_S = 20.0  # for what comes soon; a busy machine may take a while

NewClient: TypeAlias = Callable[[], Awaitable[Bus]]


def prompt(group: int, index: int = 0) -> Prompt:
    return Prompt(group_id=group, index=index, group_size=8, prompt="2+3=", task={"answer": "5"}, seed=7, min_version=4)


def partial(group: int, tokens: int) -> Partial:
    logprobs = np.full(tokens, -0.5)
    return Partial(group_id=group, index=0, tokens=range(tokens), logprobs=logprobs, segments=[(3, tokens)])


def rollout(group: int, index: int = 0, tokens: int = 20) -> Rollout:
    return Rollout(
        group_id=group,
        index=index,
        group_size=8,
        prompt="2+3=",
        task={"answer": "5"},
        prompt_tokens=[1, 2, 3],
        tokens=np.arange(tokens),
        logprobs=np.full(tokens, -0.5),
        segments=[(3, tokens)],
        finish="stop",
        text="5",
    )


async def take(entries: AsyncIterator[Entry], count: int) -> list[Entry]:
    async with asyncio.timeout(WAIT_S):
        return [await anext(entries) for _ in range(count)]


def groups(deliveries: Sequence[Delivery]) -> list[int]:
    return [delivery.entry.sample[0] for delivery in deliveries if delivery.entry.sample]


async def fetch_until(subscription: Subscription, count: int, wait_s: float = WAIT_S) -> list[Delivery]:
    out: list[Delivery] = []
    async with asyncio.timeout(wait_s):
        while len(out) < count:
            out += await subscription.fetch(100, 0.2)
    return out


async def connected(url: str, run: str = "run", ack_wait_s: float = 1.0) -> JetStreamBus:
    bus = JetStreamBus(run, url, "test")
    await bus.connect()
    await bus.setup(ack_wait_s=ack_wait_s)
    return bus


async def kill_and_restart(server: NatsServer, down_s: float = 0.3) -> None:
    os.kill(server.pid, signal.SIGKILL)
    await asyncio.sleep(down_s)
    await server.restart()
