"""`rollstream run` and `rollstream up`: bring up the log and the actors, show what happens, end in order.

The launcher holds no state of the run either. Kill it and everything ends; run it again with `--resume` and the log
tells all actors where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import structlog

from bus.jetstream import JetStreamBus
from bus.port import Bus
from bus.table import CONTROL, check_run_name
from ops.datasets import read_notes
from ops.evaluations import ensure_evaluated
from ops.feed import beat_for, feed_beats, feed_log, feed_own
from ops.folders import ELSEWHERE, check_up, resuming, run_name_of
from ops.host import ProcessSpec, Role, as_user_error, initial_model
from ops.metrics.feed import written_beside
from ops.metrics.tensorboard import need_tensorboard
from ops.nats_server import NatsServer, not_yours
from ops.recipe import Recipe
from ops.screen import Screen, open_screen
from ops.summary import plot, print_summary, summarise
from ops.supervise import Supervisor, run_once
from ops.view import RunView
from ops.weights import folder_here
from ops.workers import Crew
from schemas import Control, UserError

log = structlog.get_logger()

SHOW_EVERY_S = 0.5
EXPORT_S = 600.0  # for a trainer that somebody else has started to write the model, when all steps are done
SETTLE_S = 1.2  # after the end, so that the last beats arrive
# What cannot change between the starts of one run, since the log's contents depend on it.
FIXED = ("controller.batch_groups", "controller.group_size", "seed")


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
    """A run's place: its folder, its name on the bus, and the bus."""

    folder: Path
    run: str
    url: str


async def run(recipe: Recipe, folder: Path, resume: bool = False, nats: str | None = None, plain: bool = False) -> int:
    """Run a recipe on this machine to its end; returns the exit status.

    Raises:
        UserError: what is wrong and what to do. Everything that was stored stays; `resume` continues it.
    """
    folder = folder.resolve()
    _claim(recipe, folder, resume)
    try:
        await _check(recipe, folder, nats or recipe.bus.url)
    except BaseException:  # Ctrl-C too
        if not resume:  # nothing was begun, so nothing is to be resumed: the next try is a new run again
            (folder / "recipe.yaml").unlink(missing_ok=True)
        raise
    try:
        return await _run(recipe, folder, nats, plain)
    except OSError as error:  # the launcher writes too, and may be the first to find the disk full
        if told := as_user_error(error, folder):
            raise told from error
        raise


async def _run(recipe: Recipe, folder: Path, nats: str | None, plain: bool) -> int:
    from ops.logging import configure

    configure(folder / "logs" / "launcher.jsonl", run=folder.name, actor="launcher", console=False)
    view = RunView(
        folder.name, recipe.steps, recipe.controller.max_staleness, recipe.batch_samples, started_s=time.time()
    )
    interrupts = _Interrupts()
    with interrupts.caught():
        await _prepared(recipe, folder, interrupts)
        if interrupts.draining.is_set():
            print(f"stopped before the first step; begin again with: {resuming(folder)}")
            return 130
        if notes := read_notes(folder):
            print(notes, flush=True)
        async with (
            _log(recipe, folder, nats or recipe.bus.url) as (where, bus, server),
            written_beside(bus, recipe.metrics, folder, recipe.to_log()),
        ):
            if not recipe.evaluation.every:
                await ensure_evaluated(recipe, where, bus, view, 0)
            status = await _lead(recipe, where, bus, server, view, interrupts, plain)
            if status == 0 and recipe.trainer.ranks == 0:
                await _exported(folder / "model", view.started_s)
            if status == 0:
                await ensure_evaluated(recipe, where, bus, view, 0, recipe.steps)
    summary = summarise(view, time.time())
    (folder / "summary.json").write_text(summary.to_json())
    plot(summary, folder / "summary.png")
    print_summary(summary)
    if notes:
        print(notes)
    print(f"plot: {folder / 'summary.png'}")
    if status == 0:
        print(f"model: {folder / 'model'}")
    else:
        print(f"stopped; go on with: {resuming(folder)}")
    return status


async def up(
    role: Role,
    run: str | None,
    nats: str | None,
    folder: Path | None,
    count: int = 1,
    name: str | None = None,
    ranks: int | None = None,
) -> int:
    """Add actors of one role to a run that is going on, until it ends or Ctrl-C.

    The run is found by its folder, or by the server's URL and the run's name; its recipe comes from the bus. `ranks`
    are those of a trainer, for `trainer.ranks` of the recipe.
    """
    from ops.logging import configure

    where = locate(folder, run, nats)
    if folder is not None and nats is None:
        await check_up(where.run, where.url, where.folder)
    configure(None, run=where.run, actor=f"up-{role}", console=True)
    bus = JetStreamBus(where.run, where.url, f"up-{role}")
    await bus.connect()
    try:
        start = await start_of(bus, where.run)
        if folder is None:
            where = dataclasses.replace(where, folder=Path(start.detail))
        return await _join(role, where, bus, _with_ranks(start.recipe, role, count, ranks), count, name)
    finally:
        await bus.close()


def _with_ranks(recipe_yaml: str, role: Role, count: int, ranks: int | None) -> str:
    """The recipe with the ranks that the command line asks for. Raises `UserError`."""
    if role != "trainer":
        if ranks is not None:
            raise UserError(f"--ranks is for a trainer, not for a {role}.", "Use --count for several of them.")
        return recipe_yaml
    if count > 1:
        raise UserError("A run has one trainer; --count would start several.", "Use --ranks for one of many processes.")
    recipe = Recipe.from_yaml(recipe_yaml)
    wanted = ranks or max(recipe.trainer.ranks, 1)
    return recipe.changed([f"trainer.ranks={wanted}"], "the recipe on the bus").to_yaml()


async def _join(role: Role, where: Where, bus: Bus, recipe_yaml: str, count: int, name: str | None) -> int:
    recipe = Recipe.from_yaml(recipe_yaml)
    if role == "evaluator" and not (recipe.evaluation.every and recipe.evaluation.count):
        raise UserError(
            f"The run {where.run} evaluates only its first version and its last, and its launcher does that.",
            "Continue it with --resume and evaluation.every=10, or another number of versions.",
        )
    if role == "episode" and recipe.episode is None:
        raise UserError(f"The run {where.run} has no episodes.", "Its recipe needs a section episode: for that.")
    where = dataclasses.replace(where, folder=await folder_here(bus, recipe, where.folder, role))
    tag = name or f"{socket.gethostname()}-{secrets.token_hex(2)}"
    heavy = role in ("rollout", "trainer", "evaluator")
    supervisor = Supervisor(lambda text: print(text, flush=True), heavy, recipe.hung_after_s)
    interrupts = _Interrupts()
    side = [
        asyncio.create_task(beat_for(bus, supervisor, f"up-{tag}"), name="beats"),
        asyncio.create_task(feed_beats(bus, supervisor.heard), name="reads beats"),
    ]
    try:
        with interrupts.caught():
            logs = where.folder / "logs"
            print(f"starting {count} {role} actor(s) of {where.run}, with logs in {logs}", flush=True)
            for i in range(count):
                spec = ProcessSpec(((role, f"{role}-{tag}-{i}"),), where.run, where.url, where.folder, recipe_yaml)
                await supervisor.start(spec)
            print(f"{count} {role} actor(s) joined {where.run}; Ctrl-C hands their work over and leaves", flush=True)
            return await _until_done(supervisor, interrupts, recipe, side)
    finally:
        for task in side:
            task.cancel()
        await asyncio.gather(*side, return_exceptions=True)


def locate(folder: Path | None, run: str | None, nats: str | None) -> Where:
    """Where a run is. Raises `UserError` if that cannot be told."""
    if folder is not None:
        file = folder / "run.json"
        try:
            told = json.loads(file.read_text())
            return Where(folder.resolve(), str(told["run"]), nats or str(told["url"]))
        except FileNotFoundError:
            raise UserError(
                f"{folder} is no run folder: it has no run.json.", "Name the folder that `run` printed."
            ) from None
        except OSError as error:
            raise not_yours(file, error) from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} cannot be read: {error}.", "Start the run again with --resume.") from None
    if nats is None or run is None:
        raise UserError("It is not told which run.", "Give --run FOLDER, or --nats URL and --run-name NAME.")
    return Where(Path(), check_run_name(run), nats)


# ---- bringing up


def _claim(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Make the run's folder, or check that it can be continued with this recipe."""
    run_name_of(folder)
    stored = folder / "recipe.yaml"
    if stored.exists():
        if not resume:
            raise UserError(f"{folder} holds a run already.", "Continue it with --resume, or give another --dir.")
        before = Recipe.from_yaml(stored.read_text(), str(stored)).model_dump()
        now = recipe.model_dump()
        for key in FIXED:
            old, new = _at(before, key), _at(now, key)
            if old != new:
                raise UserError(
                    f"{key} is {new} in the recipe, but {old} in the run to be resumed.",
                    f"Add {key}={old}, or start a new run.",
                )
    elif resume:
        raise UserError(f"There is no run to resume in {folder}.", "Leave out --resume, or correct --dir.")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        stored.write_text(recipe.to_yaml())
    except OSError as error:
        raise UserError(f"The run folder {folder} cannot be written: {error}.", ELSEWHERE) from None


async def _check(recipe: Recipe, folder: Path, url: str | None) -> None:
    """The user's files and server, before anything long is begun. Raises `UserError`."""
    from ops.precheck import main

    if url is None and recipe.bus.replicas > 1:
        raise UserError(
            f"bus.replicas is {recipe.bus.replicas}, but the private server is a single one.",
            "Name the servers of a cluster in bus.url or --nats, or leave bus.replicas at 1.",
        )
    if recipe.metrics.tensorboard:
        need_tensorboard()
    bus = JetStreamBus(folder.name, url, "launcher") if url is not None else None
    try:
        if bus is not None:
            await bus.connect()
        spec = ProcessSpec((("controller", "precheck"),), "", "", folder, recipe.to_yaml())
        await run_once(main, (recipe.to_yaml(), folder), spec, folder / "logs" / "precheck.out")
        if bus is not None:
            await bus.setup(recipe.bus.ack_wait_s, recipe.bus.replicas)
    finally:
        if bus is not None:
            await bus.close()


def _at(fields: dict[str, object], key: str) -> object:
    value: object = fields
    for part in key.split("."):
        assert isinstance(value, dict)
        value = value[part]
    return value


async def _prepared(recipe: Recipe, folder: Path, interrupts: _Interrupts) -> None:
    """Version 0, made in a process of its own whose progress is shown."""
    from ops.prepare import main

    if initial_model(folder).exists():
        return
    spec = ProcessSpec((("trainer", "prepare"),), "", "", folder, recipe.to_yaml())
    output = folder / "logs" / "prepare.out"
    work = asyncio.create_task(run_once(main, (recipe.to_yaml(), folder), spec, output))
    stopping = asyncio.create_task(interrupts.draining.wait())
    shown = output.stat().st_size if output.exists() else 0
    try:
        while not work.done() and not stopping.done():
            await asyncio.wait([work, stopping], timeout=SHOW_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            shown = _show_new(output, shown)
        if work.done():
            work.result()
    finally:
        work.cancel()
        stopping.cancel()
        await asyncio.gather(work, stopping, return_exceptions=True)


def _show_new(output: Path, shown: int) -> int:
    if output.exists():
        with output.open("rb") as file:
            file.seek(shown)
            new = file.read()
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()
        return shown + len(new)
    return shown


async def _exported(model: Path, since_s: float) -> None:
    """Wait until a trainer that is not ours has written the model, after its last step. Raises `UserError`."""
    until_s = time.monotonic() + EXPORT_S
    while not model.exists() or model.stat().st_mtime < since_s:
        if time.monotonic() > until_s:
            raise UserError(
                f"All steps are done, but your trainer has not written {model} within {EXPORT_S:.0f} s.",
                "Start it again, of this run, and it will; then continue with --resume for the summary.",
            )
        await asyncio.sleep(SHOW_EVERY_S)


@contextlib.asynccontextmanager
async def _log(recipe: Recipe, folder: Path, url: str | None) -> AsyncIterator[tuple[Where, Bus, NatsServer | None]]:
    """The run's streams, on a server of our own in the run's folder or on the one at `url`."""
    server = None if url else NatsServer()
    if server is not None:
        url = await server.start(folder)
    assert url is not None
    try:
        where = Where(folder, folder.name, url)
        bus = JetStreamBus(where.run, where.url, "launcher")
        await bus.connect()
        try:
            await bus.setup(recipe.bus.ack_wait_s, recipe.bus.replicas)
            await bus.publish(
                Control(action="start", nonce=secrets.token_hex(8), recipe=recipe.to_log(), detail=str(folder))
            )
            _write_private(folder / "run.json", {"run": where.run, "url": where.url, "pid": os.getpid()})
            yield where, bus, server
        finally:
            await bus.close()
    finally:
        if server is not None:
            await server.stop()


def _write_private(path: Path, content: dict[str, object]) -> None:
    """It holds the server's credential."""
    aside = path.with_suffix(".tmp")
    aside.touch(mode=0o600)
    aside.write_text(json.dumps(content))
    aside.replace(path)


async def start_of(bus: Bus, run: str) -> Control:
    """The newest start of the run. Raises `UserError` if there is none."""
    if not await bus.exists():
        raise UserError(f"The server has no run named {run}.", "Check the name with `rollstream status`.")
    info = await bus.info(CONTROL)
    for seq in range(info.last_seq, info.first_seq - 1, -1):
        message = (await bus.get(CONTROL, [seq]))[0].message()
        if isinstance(message, Control) and message.action == "start":
            return message
    raise UserError(f"The run {run} was never started.", "Start it with `rollstream run`.")


# ---- running


async def _lead(
    recipe: Recipe,
    where: Where,
    bus: Bus,
    server: NatsServer | None,
    view: RunView,
    interrupts: _Interrupts,
    plain: bool,
) -> int:
    """Start all actors, show them until they are done, and end them in order."""
    screen = open_screen(plain)
    supervisor = Supervisor(note=screen.note, hung_after_s=recipe.hung_after_s)
    crew = Crew(supervisor, recipe, where)
    await crew.start(bus)
    _write_private(where.folder / "processes.json", dict(supervisor.pids))
    side = [
        asyncio.create_task(feed_log(bus, view), name="reads steps and batches"),
        asyncio.create_task(feed_own(view, server), name="reads own gauges"),
        asyncio.create_task(beat_for(bus, supervisor, "launcher", crew.gauges), name="beats"),
        asyncio.create_task(crew.follow(bus), name="keeps the number of workers"),
        asyncio.create_task(
            feed_beats(bus, lambda beat: view.beat(beat, time.time()), supervisor.heard), name="reads beats"
        ),
        asyncio.create_task(_show(screen, view, supervisor, where.folder), name="shows"),
    ]
    if server is not None:
        side.append(asyncio.create_task(server.supervise(), name="supervises nats-server"))
    try:
        status = await _until_done(supervisor, interrupts, recipe, side, screen)
        await asyncio.sleep(SETTLE_S)
        return status
    finally:
        with contextlib.suppress(Exception):
            screen.show(view, time.time())
        screen.close()
        for task in side:
            task.cancel()
        await asyncio.gather(*side, return_exceptions=True)


async def _until_done(
    supervisor: Supervisor,
    interrupts: _Interrupts,
    recipe: Recipe,
    side: Sequence[asyncio.Task[None]] = (),
    screen: Screen | None = None,
) -> int:
    """Watch the processes until all are done (0) or the user wants to stop (130). A failing side task ends it."""
    watching = asyncio.create_task(supervisor.watch(), name="watches processes")
    draining = asyncio.create_task(interrupts.draining.wait())
    try:
        await asyncio.wait([watching, draining, *side], return_when=asyncio.FIRST_COMPLETED)
        for failed in side:
            if failed.done():
                failed.result()
        if watching.done():
            watching.result()
            return 0
        text = "draining: the step in hand ends, unfinished samples are handed over; Ctrl-C again to kill"
        screen.note(text) if screen else print(text, flush=True)
        killing = asyncio.create_task(interrupts.killing.wait())
        drain = asyncio.create_task(supervisor.drain())
        await asyncio.wait([killing, drain], return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        return 130
    finally:
        if not watching.done() or watching.exception() is not None:
            await supervisor.drain(grace_s=0.0 if interrupts.killing.is_set() else 20.0)
        for task in (watching, draining):
            task.cancel()
        await asyncio.gather(watching, draining, return_exceptions=True)
        supervisor.kill()


class _Interrupts:
    """The first Ctrl-C or SIGTERM asks for a drain, the second for a kill."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.killing = asyncio.Event()

    def _caught(self) -> None:
        (self.killing if self.draining.is_set() else self.draining).set()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._caught)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


# ---- showing


async def _show(screen: Screen, view: RunView, supervisor: Supervisor, folder: Path) -> None:
    pids: dict[str, int] = {}
    while True:
        if supervisor.pids != pids:
            pids = supervisor.pids
            _write_private(folder / "processes.json", dict(pids))
        screen.show(view, time.time())
        await asyncio.sleep(SHOW_EVERY_S)
