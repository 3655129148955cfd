"""One process and the actors in it. What `rollstream run` starts many of and `rollstream up` starts one of.

Heavy modules are imported where an actor needs them, so that a process with a controller and a reward worker stays at
some 40 MB.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, get_args

import structlog

from bus.jetstream import JetStreamBus
from bus.port import Bus, BusFull
from bus.table import CONTROL, PUBLISH_DEADLINE_S
from ops.recipe import Recipe
from schemas import Control, UserError

if TYPE_CHECKING:
    from actors.episode.config import EpisodeConfig
    from actors.rollout.config import RolloutConfig
    from actors.rollout.engine import Engine
    from ops.text import HfTokenizer

log = structlog.get_logger()

T = TypeVar("T")

Role: TypeAlias = Literal["controller", "rollout", "reward", "episode", "trainer", "evaluator"]
ROLES: tuple[Role, ...] = get_args(Role)
KNOW_THEIR_END: tuple[Role, ...] = ("trainer", "evaluator")
RECONNECT_S = 0.2
STOP_S = 20.0  # for the other actors of a process to end when one has
EXIT_DONE = 0
EXIT_FAILED = 1  # the log has the traceback
EXIT_USER_ERROR = 2
EXIT_STOPPED = 3  # by SIGTERM, before the run had ended


class Actor(Protocol):
    """What runs in a process."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until the run is over or `stop` is set."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start: which actors, of which run. `folder` is the run's folder, where weights and logs lie."""

    actors: tuple[tuple[Role, str], ...]  # (role, name)
    run: str
    url: str
    folder: Path
    recipe_yaml: str
    died: str = ""  # how the one before it ended: "crashed with SIGSEGV"; empty at the first start, or if in order

    @property
    def name(self) -> str:
        """The names of its actors."""
        return "+".join(name for _, name in self.actors)

    @property
    def optional(self) -> bool:
        """Whether the run goes on as well without it."""
        return all(role == "evaluator" for role, _ in self.actors)

    @property
    def error_file(self) -> Path:
        """Where a process that ends by a `UserError` leaves it."""
        return self.folder / "logs" / f"{self.name}.error.json"

    @property
    def record_file(self) -> Path:
        """Where an episode worker writes what it is at."""
        return self.folder / "logs" / f"{self.name}.running"

    def leave(self, error: UserError) -> None:
        """Leave the error for whoever started the process, if the disk takes it."""
        with contextlib.suppress(OSError):
            self.error_file.parent.mkdir(parents=True, exist_ok=True)
            self.error_file.write_text(json.dumps({"message": error.message, "remedy": error.remedy}))

    def left_error(self) -> UserError:
        """The error of a process that ended with `EXIT_USER_ERROR`."""
        try:
            return UserError(**json.loads(self.error_file.read_text()))
        except (OSError, ValueError):  # a full disk leaves it out, or cut short
            return UserError(
                f"{self.name} stopped, and could not write why into {self.error_file.parent}; the disk may be full.",
                "Free some space and continue with --resume.",
            )


def initial_model(folder: Path) -> Path:
    """The folder of version 0, as `ops.prepare` leaves it."""
    return folder / "initial"


def weights_folder(folder: Path) -> Path:
    """Where weight versions lie."""
    return folder / "weights"


def main(spec: ProcessSpec) -> None:
    """The whole life of a process; exits with one of the `EXIT_` codes, or with a traceback and 1."""
    from ops.logging import configure

    recipe = Recipe.from_yaml(spec.recipe_yaml)
    configure(spec.folder / "logs" / f"{spec.name}.jsonl", run=spec.run, actor=spec.name)
    spec.error_file.unlink(missing_ok=True)
    if spec.actors[0][0] == "trainer" and recipe.trainer.ranks > 1 and "WORLD_SIZE" not in os.environ:
        from ops.trainer_job import run_job

        sys.exit(run_job(spec, recipe))
    try:
        done = _run(host(spec, recipe))
    except (Exception, SystemExit) as error:  # the latter of a user's function: it must not look like our own
        mendable = as_user_error(error, spec.folder) if isinstance(error, Exception) else None
        if mendable is None:
            log.exception("actor_failed")
            sys.exit(EXIT_FAILED)
        log.error("actor_stopped", reason=mendable.message, remedy=mendable.remedy)
        spec.leave(mendable)
        sys.exit(EXIT_USER_ERROR)
    if not done:
        sys.exit(EXIT_STOPPED)


def as_user_error(error: Exception, folder: Path) -> UserError | None:
    """What the user can mend in a failure, None if starting again may help or the fault is ours."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, BusFull):
        return UserError(str(error), "Then continue with --resume.")
    cause: BaseException | None = error
    while cause is not None:  # torch.save answers a full disk with a RuntimeError of its own, raised in handling it
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return UserError(
                f"The disk of {folder} is full: {cause}.",
                "Free some space, or lower trainer.keep_checkpoints and trainer.keep_versions; continue with --resume.",
            )
        cause = cause.__cause__ or cause.__context__
    return None


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def host(spec: ProcessSpec, recipe: Recipe, stop: asyncio.Event | None = None) -> bool:
    """Run the actors of a process until they end, `stop` is set, SIGTERM comes or the run's end is announced.

    False if they were stopped before their time.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # Ctrl-C reaches the whole process group; the supervisor turns it into an orderly SIGTERM.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    bus = await _connected(spec, stop)
    try:
        actors = [(role, name, _actor(role)(bus, recipe, spec, name)) for role, name in spec.actors]
        return await run_actors(bus, recipe.steps, actors, stop)
    finally:
        await bus.close()


async def run_actors(bus: Bus, steps: int, actors: Sequence[tuple[Role, str, Actor]], stop: asyncio.Event) -> bool:
    """Run the actors of a process until they end, `stop` is set or the end of the run's `steps` is announced.

    False if they were stopped before their time. Raises what an actor raises, after the others were stopped.
    """
    over = asyncio.Event()  # the run has ended, or we are to stop
    watcher = asyncio.create_task(_watch_end(bus, steps, over), name="watches for the end")
    stopping = asyncio.create_task(_follow(stop, over), name="watches for the stop")
    # Some know by themselves when they are done; after a crash that is long after the end was announced.
    tasks = [
        asyncio.create_task(actor.run(stop if role in KNOW_THEIR_END else over), name=name)
        for role, name, actor in actors
    ]
    try:
        while running := [task for task in tasks if not task.done()]:
            await asyncio.wait([*running, watcher], return_when=asyncio.FIRST_COMPLETED)
            for task in (*running, watcher):
                if task.done():
                    task.result()
        return not stop.is_set()
    finally:
        stop.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*tasks, return_exceptions=True)
        watcher.cancel()
        stopping.cancel()
        await asyncio.gather(watcher, stopping, return_exceptions=True)


async def _connected(spec: ProcessSpec, stop: asyncio.Event) -> JetStreamBus:
    """The bus. The launcher has reached the server before, so if it does not answer now, it is being started again."""
    until_s = time.monotonic() + PUBLISH_DEADLINE_S
    while True:
        bus = JetStreamBus(spec.run, spec.url, spec.name)
        try:
            await bus.connect()
        except UserError as error:
            if stop.is_set() or time.monotonic() > until_s:
                raise
            log.warning("server_not_reached", reason=error.message)
            await asyncio.sleep(RECONNECT_S)
        else:
            return bus


async def _follow(stop: asyncio.Event, over: asyncio.Event) -> None:
    await stop.wait()
    over.set()


async def _watch_end(bus: Bus, steps: int, over: asyncio.Event) -> None:
    async for entry in bus.read(CONTROL):
        message = entry.message()
        if isinstance(message, Control) and message.action == "stop" and message.nonce == f"end-{steps}":
            over.set()
            await asyncio.Event().wait()  # the actors end by themselves; this task ends with them


class _Lazy:
    """An actor that is built inside its own task, off the event loop: models and large data take seconds to load."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build

    async def run(self, stop: asyncio.Event) -> None:
        actor = await asyncio.to_thread(self.build)
        await actor.run(stop)


def _actor(role: Role) -> Callable[[Bus, Recipe, ProcessSpec, str], Any]:
    return {
        "controller": _controller,
        "rollout": _rollout,
        "reward": _reward,
        "episode": _episode,
        "trainer": _trainer,
        "evaluator": _evaluator,
    }[role]


def _controller(bus: Bus, recipe: Recipe, spec: ProcessSpec, name: str) -> Any:
    def build() -> Any:
        from actors.controller.actor import Controller
        from ops.datasets import load_dataset
        from ops.text import prompt_counter

        count = prompt_counter(recipe.data, lambda: initial_model(spec.folder))
        data = load_dataset(recipe.data, recipe.base, seed=recipe.seed, count_tokens=count)
        return Controller(bus, recipe.controller, recipe.steps, recipe.seed, data.row, name)

    return _Lazy(build)


def _reward(bus: Bus, recipe: Recipe, spec: ProcessSpec, name: str) -> Any:
    from actors.reward.actor import RewardWorker
    from actors.reward.pool import RewardPool
    from ops.text import decoder_of

    pool = RewardPool(recipe.reward, recipe.base, decoder_of(lambda: initial_model(spec.folder)))
    return RewardWorker(bus, recipe.reward, pool, name)


def _episode(bus: Bus, recipe: Recipe, spec: ProcessSpec, name: str) -> Any:
    config = recipe.episode
    if config is None:
        raise UserError("The run has no episodes.", "Add a section episode: to its recipe.")

    def build() -> Any:
        from actors.episode.actor import EpisodeWorker
        from actors.episode.builtin import load_episode
        from actors.episode.deaths import Deaths
        from ops.text import HfTokenizer

        tokenizer = HfTokenizer(str(initial_model(spec.folder)), recipe.data.template_options)
        function = (
            _agent(bus, recipe, config, tokenizer, spec.folder, name)
            if config.has_agent
            else load_episode(config, recipe.reward, recipe.base)
        )
        # An agent runs in a process of its own: what ends ours is no doing of a single one.
        record = None if config.has_agent else spec.record_file
        deaths = Deaths(bus, config.what, config.at_once, record, spec.died)
        return EpisodeWorker(bus, config, function, tokenizer, recipe.rollout.max_new_tokens, name, deaths)

    return _Lazy(build)


def _agent(bus: Bus, recipe: Recipe, config: EpisodeConfig, tokenizer: HfTokenizer, folder: Path, name: str) -> Any:
    from actors.episode.endpoint.episode import AgentEpisode, check_agent
    from actors.episode.endpoint.place import Place

    check_agent(config, recipe.base)
    _, _, number = name.rpartition("-")
    port = config.endpoint.port and config.endpoint.port + (int(number) if number.isdecimal() else 0)
    place = Place(folder / f"endpoint-{name}.json", port)
    return AgentEpisode(
        bus,
        config,
        recipe.base,
        place,
        tokenizer,
        recipe.name,
        recipe.rollout.temperature,
        recipe.rollout.max_new_tokens,
    )


def _early_stop(recipe: Recipe, decode: Callable[[Sequence[int]], str]) -> Any:
    from actors.functions import load_function
    from actors.rollout.early_stop import EarlyStop

    config = recipe.rollout.stop_early
    if config is None:
        return None
    predicate = load_function(config.predicate, recipe.base) if config.predicate else None
    return EarlyStop(config, recipe.rollout.max_new_tokens, decode, predicate)


def _rollout(bus: Bus, recipe: Recipe, spec: ProcessSpec, name: str) -> Any:
    def build() -> Any:
        from transformers import AutoConfig

        from actors.rollout.actor import RolloutWorker
        from ops.text import HfTokenizer
        from ops.weights import reader_of

        path = str(initial_model(spec.folder))
        engine = _engine(path, recipe.rollout)
        tokenizer = HfTokenizer(path, recipe.data.template_options)
        stop_ids = tokenizer.stop_token_ids(recipe.rollout.stop, AutoConfig.from_pretrained(path).eos_token_id)
        weights = reader_of(bus, recipe, spec.folder)
        early = _early_stop(recipe, tokenizer.decode)
        return RolloutWorker(
            bus,
            recipe.rollout,
            engine,
            tokenizer,
            stop_ids,
            weights,
            name,
            early,
            turns=recipe.episode is not None,
        )

    return _Lazy(build)


def _evaluator(bus: Bus, recipe: Recipe, spec: ProcessSpec, name: str) -> Any:
    from ops.evaluate import evaluator

    os.nice(recipe.evaluation.nice)  # here, in the main thread: the threads and children to come inherit it
    return _Lazy(lambda: evaluator(bus, recipe, spec.folder, name))


def _engine(model: str, config: RolloutConfig) -> Engine:
    """What decodes; it holds no announced version yet."""
    if config.engine == "vllm":
        from actors.rollout.vllm_engine import VllmEngine

        return VllmEngine(Path(model), config, version=-1)
    from actors.rollout.threaded import ThreadedEngine
    from actors.rollout.torch_engine import Decoder

    return ThreadedEngine(Decoder.from_pretrained(model, config, version=-1))


def _trainer(bus: Bus, recipe: Recipe, spec: ProcessSpec, name: str) -> Any:
    def build() -> Any:
        from actors.trainer.actor import Trainer
        from actors.trainer.checkpoint import Checkpoints
        from actors.trainer.evaluations import Evaluations
        from actors.trainer.ranks import OneRank
        from actors.trainer.retention import Retention
        from actors.trainer.torch_ranks import TorchRanks, in_a_job
        from ops.trained_model import export_model, load_learner, weights_of
        from ops.weights import writer_of

        initial = initial_model(spec.folder)
        ranks = TorchRanks() if in_a_job() else OneRank()
        learner = load_learner(recipe, initial, ranks)
        return Trainer(
            bus,
            recipe.trainer,
            recipe.steps,
            learner,
            lambda: weights_of(learner, recipe),
            lambda: export_model(learner, initial, spec.folder / "model"),
            writer_of(bus, recipe, spec.folder),
            Checkpoints(
                spec.folder / "checkpoints", Retention(recipe.trainer.keep_checkpoints, recipe.trainer.keep_every)
            ),
            name,
            ranks,
            Evaluations(bus, recipe.evaluation.every) if recipe.evaluation.every else None,
        )

    return _Lazy(build)


def replace_folder(aside: Path, final: Path) -> None:
    """Put a finished folder in the place of another, durably and readable by all.

    `aside` is named `.<name of final>-<anything>`; what writers that died left under such names is removed.
    """
    import shutil

    from bus.weights import sync_folder

    for file in aside.iterdir():
        file.chmod(0o644)  # save_pretrained writes 0600
        with file.open("rb") as written:
            os.fsync(written.fileno())
    sync_folder(aside)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    sync_folder(final.parent)
    for leftover in final.parent.glob(f".{final.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
