"""A short real run, all of whose actors live in one process on the log in memory; and logs made of it, to be broken."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from bus.memory import MemoryBus, MemoryHub
from bus.port import Entry, headers_of, key_of
from bus.table import STREAM_OF, STREAMS, WEIGHTS, Stream
from ops.host import ProcessSpec, Role, _actor, initial_model
from ops.log_source import LogSource, RunLog
from ops.prepare import prepare
from ops.recipe import load_recipe
from ops.record import record
from schemas import Control, Message, encode
from tests.ops.sound_log import Log, LogInLists

RECIPE = Path(__file__).parents[1] / "e2e" / "recipe" / "recipe.yaml"
RUN, STEPS, DEADLINE_S = "recorded", 4, 240.0
IN_ORDER: tuple[Role, ...] = ("trainer", "rollout", "reward", "controller")
SMALL = ("controller.batch_groups=2", "rollout.max_new_tokens=64", "rollout.slots=4")


async def record_run(folder: Path, *changes: str) -> Path:
    """Run the recipe of the end-to-end tests for a few steps and record it; the recording's path."""
    recipe = load_recipe(RECIPE, [f"steps={STEPS}", *SMALL, *changes])
    prepare(recipe, folder)
    hub = MemoryHub()
    bus = MemoryBus(RUN, hub)
    await bus.setup(recipe.bus.ack_wait_s)
    await bus.publish(Control(action="start", nonce="first", recipe=recipe.to_yaml(), detail=str(folder)))
    over = asyncio.Event()
    actors: dict[str, asyncio.Task[None]] = {}
    async with asyncio.timeout(DEADLINE_S):
        for role in IN_ORDER:
            spec = ProcessSpec(((role, role),), RUN, "", folder, recipe.to_yaml())
            actor = _actor(role)(MemoryBus(RUN, hub), recipe, spec, role)
            actors[role] = asyncio.create_task(actor.run(over))
            while role == "trainer" and not (await bus.info(WEIGHTS)).messages:
                await asyncio.sleep(0.02)  # transformers cannot load two models at once in a process
        await asyncio.gather(actors["trainer"], actors["controller"])
        over.set()
        await asyncio.gather(*actors.values())
    path = folder / f"{RUN}.rollstream"
    await record(RunLog(bus, folder, recipe.to_yaml()), path, initial_model(folder))
    return path


class Altered(LogInLists):
    """A recorded log with some entries changed; the initial model and the recipe are those of the recorded run."""

    def __init__(self, log: Log, source: LogSource) -> None:
        super().__init__(log, source.recipe_yaml)
        self.run = source.run

    def change(self, stream: Stream, seq: int, **changes: Any) -> Message:
        """Give the message at `seq` other fields; returns it as it was."""
        entries = self._log.entries[stream.name]
        old = entries[seq - 1].message()
        entries[seq - 1] = dataclasses.replace(entries[seq - 1], data=encode(dataclasses.replace(old, **changes)))
        return old

    def put(self, message: Message, **changes: Any) -> Entry:
        """Store one more message; `changes` are those of the entry."""
        stream = STREAM_OF[type(message)]
        entries = self._log.entries[stream.name]
        at, time_s = (entries[-1].seq + 1, entries[-1].time_s + 1.0) if entries else (1, 1e9)
        entry = Entry(stream, at, key_of(message), headers_of(self.run, message), encode(message), time_s)
        entries.append(dataclasses.replace(entry, **changes))
        return entries[-1]

    def put_raw(self, entry: Entry) -> None:
        """Store an entry as it is."""
        self._log.entries[entry.stream.name].append(entry)

    def remove_last(self, stream: str) -> None:
        """Take a stream's newest entry out."""
        self._log.entries[stream].pop()

    def purge(self, stream: str, below_seq: int) -> None:
        """Take all entries before a sequence out."""
        self._log.entries[stream] = [entry for entry in self._log.entries[stream] if entry.seq >= below_seq]

    def drop(self, stream: str, seq: int) -> None:
        """Take one entry out."""
        self._log.entries[stream] = [entry for entry in self._log.entries[stream] if entry.seq != seq]


async def record_altered(log: Altered, recorded: Path, path: Path) -> Path:
    """Record a changed log with the initial model of the recorded run."""
    await record(log, path, initial_model(recorded.parent))
    return path


async def altered(source: LogSource) -> Altered:
    """A copy of a log in lists, to be changed."""
    log = Log()
    for stream in STREAMS:
        log.entries[stream.name] = [entry async for entry in source.read(stream)]
    return Altered(log, source)
