"""`rollstream replay bus`: a recorded log laid down in a fresh run, as it was, at the pace it had or any other.

The fresh run is whole up to where the replay stops, so that real actors can go on with it: that is how a bug is met
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from bus.jetstream import JetStreamBus
from bus.port import Entry
from bus.restore import Restorer
from bus.table import (
    ANSWERS,
    BATCHES,
    CONTROL,
    DEAD,
    DROPPED,
    EVALUATIONS,
    NOTES,
    PARTIALS,
    PROMPTS,
    REWARD_WORKERS,
    ROLLOUT_WORKERS,
    ROLLOUTS,
    SCORED,
    STEPS,
    TURNS,
    WEIGHTS,
    Consumer,
    Stream,
    check_run_name,
)
from ops.console import open_console, tell_damage
from ops.folders import ELSEWHERE, RUNS, run_name_of
from ops.host import initial_model, weights_folder
from ops.log_source import LogSource, RunLog, initial_model_of, open_log
from ops.nats_server import NatsServer
from ops.progress import Progress, stopped_by_ctrl_c
from ops.replay.history import History, check_range, newest_recipe_of, read_history
from schemas import UserError

# Leases are no record: they end with the seconds that they were taken for. Ties in time are broken in this order.
REPLAYED: Final = (
    CONTROL, PROMPTS, PARTIALS, TURNS, ANSWERS, NOTES, ROLLOUTS, SCORED, DROPPED, BATCHES, WEIGHTS, STEPS, EVALUATIONS,
    DEAD,
)  # fmt: skip


async def main(
    target: str | None,
    folder: Path | None,
    nats: str | None,
    run_name: str | None,
    speed: str,
    start: int,
    stop: int | None,
    streams: str | None,
    serve: bool,
) -> int:
    """Lay a log down in a fresh run; 0, 1 if a part of it could not be read, or 130 after Ctrl-C.

    Raises:
        UserError: the log cannot be read, or the run cannot be written.
    """
    pace = parse_speed(speed)
    chosen = parse_streams(streams)
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(open_log(target))
        folder = _claimed(folder or RUNS / f"{source.run[:40]}-replay-{time.strftime('%H%M%S')}", run_name)
        run = check_run_name(run_name or run_name_of(folder))
        recipe = newest_recipe_of(source)
        span = await _span(source, start, stop)
        await asyncio.to_thread(_furnish, source, folder, span[2])
        url = nats
        if url is None:
            server = NatsServer()
            url = await server.start(folder)
            stack.push_async_callback(server.stop)
        bus = JetStreamBus(run, url, "replay")
        await bus.connect()
        stack.push_async_callback(bus.close)
        if await bus.exists():
            raise UserError(f"The server holds a run {run} already.", "Give a fresh name with --run-name.")
        await bus.setup(recipe.bus.ack_wait_s)
        _write_private(folder / "run.json", json.dumps({"run": run, "url": url, "pid": os.getpid()}))
        (folder / "recipe.yaml").write_text(recipe.to_yaml())
        ended = stack.enter_context(stopped_by_ctrl_c())
        began = time.monotonic()
        count = await lay_down(source, run, url, span, chosen, pace, recipe.bus.ack_wait_s, ended)
        print(f"{count:,} entries of {source.run} laid down as {run} in {time.monotonic() - began:.1f} s: {folder}")
        print(f"look at it with: rollstream audit {folder}")
        tell_damage(source.damage, open_console())
        if serve and not ended.is_set():
            print(f"serving; start actors with: rollstream up rollout --run {folder}   (Ctrl-C ends)", flush=True)
            await ended.wait()
            return 0
        damaged = bool(source.damage)
    return 130 if ended.is_set() else int(damaged)


async def lay_down(
    source: LogSource,
    run: str,
    url: str,
    span: tuple[float, float, int],
    streams: Sequence[Stream],
    pace: float | None,
    ack_wait_s: float,
    stop: asyncio.Event,
) -> int:
    """Write the entries of `streams` up to the broker's time `span[1]`; those from `span[0]` on at their pace.

    `pace` is how many times as fast as recorded, None: without waiting. Returns how many were written.
    """
    restorer = Restorer(run, url)
    await restorer.connect()
    open_work = _OpenWork(streams)
    count = 0
    total = sum([(await source.info(stream)).messages for stream in streams])
    try:
        with contextlib.closing(Progress("laying down", total)) as progress:
            began: float | None = None
            fresh = {stream.name for stream in streams}
            async with contextlib.aclosing(merged(source, streams)) as entries:  # type: ignore[type-var]
                async for entry in entries:
                    if entry.time_s > span[1] or stop.is_set():
                        break
                    if pace is not None and entry.time_s >= span[0]:
                        began = began if began is not None else time.monotonic()
                        due_s = began + (entry.time_s - span[0]) / pace
                        if due_s > time.monotonic():
                            await restorer.flush()
                            await _sleep_until(due_s, stop)
                    if entry.stream.name in fresh:
                        fresh.discard(entry.stream.name)
                        await restorer.begin(entry)
                    await restorer.put(entry)
                    open_work.take(entry)
                    count += 1
                    progress.show(count)
            await restorer.flush()
        for consumer, seq in open_work.begins():
            await restorer.start_at(consumer, seq, ack_wait_s)
    finally:
        await restorer.close()
    return count


class _OpenWork:
    """Which prompts have no answer and which answers no verdict: where workers that join shall begin.

    A worker's queue is no part of the log. If the stream of the outcomes is not replayed, workers begin at the start.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = {stream.name for stream in streams}
        self._prompts: dict[str, int] = {}  # by sample id
        self._rollouts: dict[str, int] = {}
        self._last = {PROMPTS.name: 0, ROLLOUTS.name: 0}

    def take(self, entry: Entry) -> None:
        """Count an entry in."""
        name, sample = entry.stream.name, entry.id
        if name in self._last:
            self._last[name] = entry.seq
        if name == PROMPTS.name:
            self._prompts[sample] = entry.seq
        elif name == ROLLOUTS.name:
            self._prompts.pop(sample, None)
            self._rollouts[sample] = entry.seq
        elif name == SCORED.name:
            self._rollouts.pop(sample, None)
        elif name == DROPPED.name:
            self._prompts.pop(sample, None)
            self._rollouts.pop(sample, None)

    def begins(self) -> list[tuple[Consumer, int]]:
        """The first sequence that each queue's workers must see."""
        out = []
        for consumer, left, outcome in (
            (ROLLOUT_WORKERS, self._prompts, ROLLOUTS),
            (REWARD_WORKERS, self._rollouts, SCORED),
        ):
            if {consumer.stream.name, outcome.name} <= self._streams:
                out.append((consumer, min(left.values(), default=self._last[consumer.stream.name] + 1)))
        return out


async def merged(source: LogSource, streams: Sequence[Stream]) -> AsyncIterator[Entry]:
    """The entries of all streams in the order of the broker's clock; within a stream by sequence, whatever it says."""
    cut = await source.cut()
    order = {stream.name: place for place, stream in enumerate(REPLAYED)}
    async with contextlib.AsyncExitStack() as stack:
        heads: list[tuple[float, int, int]] = []  # time, place in the order, which reader
        readers = []
        entries: list[Entry] = []
        for number, stream in enumerate(streams):
            reader = source.read(stream, 1, cut.of(stream).last_seq + 1)
            await stack.enter_async_context(contextlib.aclosing(reader))
            readers.append(reader)
            first = await anext(reader, None)
            if first is not None:
                heads.append((first.time_s, order[stream.name], number))
            entries.append(first)  # type: ignore[arg-type]  # never looked at if None
        heapq.heapify(heads)
        while heads:
            _, place, number = heads[0]
            yield entries[number]
            following = await anext(readers[number], None)
            if following is None:
                heapq.heappop(heads)
            else:
                entries[number] = following
                heapq.heapreplace(heads, (following.time_s, place, number))


def parse_speed(text: str) -> float | None:
    """`1`, `2.5` times as fast, or `max`: without waiting (None). Raises `UserError`."""
    if text == "max":
        return None
    with contextlib.suppress(ValueError):
        if (speed := float(text)) > 0 and speed < float("inf"):
            return speed
    raise UserError(f"{text!r} is no speed.", "1 is the recorded pace, 2 twice as fast, max without waiting.")


def parse_streams(text: str | None) -> tuple[Stream, ...]:
    """`prompts,rollouts` as streams; None means all that are a record. Raises `UserError`."""
    if text is None:
        return REPLAYED
    known = {stream.name: stream for stream in REPLAYED}
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"There is no stream {unknown[0]!r} to replay.", f"There are {', '.join(known)}.")
    return tuple(stream for stream in REPLAYED if stream.name in names)


async def _span(source: LogSource, start: int, stop: int | None) -> tuple[float, float, int]:
    """The broker's times from which the replay is paced and at which it ends, and the first step that is left out."""
    if start == 0 and stop is None:
        newest = (await source.info(BATCHES)).last_seq
        return 0.0 if not newest else await _first_time(source), float("inf"), newest
    history: History = await read_history(source)
    start, end = check_range(history, start, stop)
    until = float("inf")
    if stop is not None:
        (entry,) = await source.get(STEPS, [stop])  # step i stands at sequence i + 1
        until = entry.time_s
    return (history.version_times[start] if start else await _first_time(source)), until, end


async def _first_time(source: LogSource) -> float:
    async for entry in source.read(CONTROL):
        return entry.time_s
    return 0.0


async def _sleep_until(due_s: float, stop: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), due_s - time.monotonic())


def _claimed(folder: Path, run_name: str | None) -> Path:
    folder = folder.resolve()
    check_run_name(run_name or run_name_of(folder))
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty.", "Give a new folder with --dir.")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}.", ELSEWHERE) from None
    return folder


def _furnish(source: LogSource, folder: Path, step: int) -> None:
    """What actors look for in a run's folder: the initial model, and what the recorded run's folder still has of
    weights and of the checkpoint at or before `step`."""
    initial = initial_model_of(source, initial_model(folder))
    if initial != initial_model(folder):
        shutil.copytree(initial, initial_model(folder), copy_function=_link)
    if not isinstance(source, RunLog):
        return
    if weights_folder(source.folder).is_dir():
        shutil.copytree(weights_folder(source.folder), weights_folder(folder), copy_function=_link)
    checkpoints = source.folder / "checkpoints"
    kept = [path for path in checkpoints.glob("step-*-*") if int(path.name.split("-")[1]) <= step]
    for path in sorted(kept)[-1:]:
        shutil.copytree(path, folder / "checkpoints" / path.name, copy_function=_link)


def _link(source: str, target: str) -> None:
    """These files are never written again, only replaced, so both runs can share their bytes on one disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write_private(path: Path, text: str) -> None:
    """It holds the server's credential."""
    path.touch(mode=0o600)
    path.write_text(text)
