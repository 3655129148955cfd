"""What a launcher hears and tells while a run goes on: the log, the beats, and what sends no beats."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import psutil

from actors import clock
from bus.port import Bus
from bus.table import BATCHES, BEAT_EVERY_S, DROPPED, EVALUATIONS, STEPS, Stream
from ops.nats_server import NatsServer
from ops.supervise import Supervisor
from ops.view import RunView
from schemas import Batch, Dropped, Evaluation, MalformedMessage, Message, StepDone

T = TypeVar("T", bound=Message)


async def feed_log(bus: Bus, view: RunView) -> None:
    """Give the view all batches, steps, drops and evaluations, for ever."""
    await asyncio.gather(
        _feed(bus, BATCHES, Batch, lambda batch, _: view.batch(batch)),
        _feed(bus, STEPS, StepDone, view.step_done),
        _feed(bus, DROPPED, Dropped, view.drop),
        _feed(bus, EVALUATIONS, Evaluation, lambda evaluation, _: view.evaluated(evaluation)),
    )


async def _feed(bus: Bus, stream: Stream, kind: type[T], take: Callable[[T, float], None]) -> None:
    """Give what a stream holds, with the Unix time of each; what does not decode is left out."""
    async for entry in bus.read(stream):
        with contextlib.suppress(MalformedMessage):
            message = entry.message()
            if isinstance(message, kind):
                take(message, entry.time_s or time.time())


async def feed_beats(bus: Bus, *takers: Callable[[Mapping[str, Any]], None]) -> None:
    """Give every beat to all takers, for ever."""
    async for beat in bus.beats():
        for take in takers:
            take(beat)


async def beat_for(
    bus: Bus, supervisor: Supervisor, actor: str, gauges: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Beat for the launcher itself, for ever: what comes back tells the supervisor that beats are heard at all."""
    while True:
        cpu_s = time.process_time()  # what it started beats for itself, or `feed_own` does for it
        own = {"actor": actor, "role": "launcher", "process": clock.process(), "cpu_s": cpu_s}
        await bus.beat({**own, **gauges()})
        supervisor.watch_for_hung()
        await asyncio.sleep(BEAT_EVERY_S)


async def feed_own(view: RunView, server: NatsServer | None) -> None:
    """Give the view the CPU of the fork server and of nats-server, which send no beats, for ever."""
    me = psutil.Process()
    while True:
        now = time.time()
        if server is not None:
            beat = {"actor": "nats-server", "role": "nats", "process": "nats-server", "cpu_s": server.cpu_seconds()}
            view.beat(beat, now)
        others = 0.0
        for child in me.children():
            with contextlib.suppress(psutil.Error):
                if server is None or child.pid != server.pid:
                    times = child.cpu_times()
                    others += times.user + times.system
        view.beat({"actor": "fork-server", "role": "launcher", "process": "fork-server", "cpu_s": others}, now)
        await asyncio.sleep(BEAT_EVERY_S)
