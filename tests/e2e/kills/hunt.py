"""Trains over one log twice: undisturbed, and with a trainer that is killed again and again."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from actors.trainer.checkpoint import load_newest
from bus.jetstream import JetStreamBus
from bus.reading import read_to_end
from bus.table import STEPS, WEIGHTS, Stream
from ops.audit import AuditReport, audit_run
from ops.recipe import Recipe
from ops.replay.compare import TIMES
from schemas import StepDone, WeightVersion
from tests.e2e.kills.forks import Forks
from tests.e2e.kills.log import lay_end, lay_log, lay_start
from tests.e2e.kills.points import DEATHS, EARLIEST, EXPORT_PHASES, OUTSIDE, PASSAGES, STEP_PHASES, leave_line

LIFE_WAIT_S = 120.0
LOOK_S = 0.005
LAST_STEPS = 8  # are left for the phase of a death to come
NO_PROGRESS = {"phase": "trained", "step": -1, "passage": 1}
OUTSIDE_S = 0.8  # from its fork on a trainer needs half of that until it trains


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run left, and of what its trainers died."""

    weights: list[WeightVersion]
    steps: list[StepDone]
    model: dict[str, bytes]
    checkpoint: tuple[int, dict[str, Any]]
    leftovers: list[str]
    audit: AuditReport
    deaths: Counter[str]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Those of each step that do not depend on the clock."""
        return [
            {name: value for name, value in step.metrics.items() if name not in TIMES and "seconds_" not in name}
            for step in self.steps
        ]


def draw_deaths(seed: int, kills: int, steps: int) -> list[dict[str, Any]]:
    """Phases and steps of so many deaths, in the order in which they are to be died; a quarter from outside."""
    random = Random(seed)
    before_end = kills - len(EXPORT_PHASES)
    outside = before_end // 4
    phases: list[str] = []
    while len(phases) < before_end - outside:
        phases += random.sample(STEP_PHASES, k=len(STEP_PHASES))
    phases = [*phases[: before_end - outside], *[OUTSIDE] * outside]
    random.shuffle(phases)
    places = sorted(random.randrange(-1, steps - LAST_STEPS) for _ in phases)
    return [
        *(
            {
                "phase": phase,
                "step": -1 if phase == "restored" else max(step, EARLIEST.get(phase, step)),
                "passage": random.randint(1, PASSAGES.get(phase, 1)),
            }
            for phase, step in zip(phases, places, strict=True)
        ),
        *({"phase": phase, "step": steps - 1} for phase in EXPORT_PHASES),
    ]


class Hunt:
    """Runs on one server, whose trainers come from `forks`. `initial` is the folder of version 0."""

    def __init__(self, forks: Forks, url: str, initial: Path, folder: Path) -> None:
        self._forks = forks
        self._url = url
        self._initial = initial
        self._folder = folder

    async def run(
        self,
        name: str,
        recipe: Recipe,
        deaths: Sequence[dict[str, Any]] = (),
        seed: int = 0,
        spoil: bool = False,
    ) -> Outcome:
        """Run `name` over the log of `recipe`: a trainer for each death, and one that lives to the end.

        With `spoil` checkpoints are damaged between two lives: the newest, or all of them.
        """
        folder = self._folder / name
        shutil.copytree(self._initial, folder / "initial")
        (folder / "recipe.yaml").write_text(recipe.to_yaml())
        (folder / "run.json").write_text(json.dumps({"run": name, "url": self._url}))
        bus = JetStreamBus(name, self._url, "hunt")
        await bus.connect()
        laying: asyncio.Task[None] | None = None
        try:
            await lay_start(bus, recipe, str(folder))
            laying = asyncio.create_task(self._lay(bus, recipe, seed))
            random = Random(seed)
            for death in deaths:
                near_its_end = (await bus.info(WEIGHTS)).messages > recipe.steps - LAST_STEPS
                if near_its_end and death["phase"] in STEP_PHASES:
                    death = death | NO_PROGRESS
                await self._die(folder, name, death, random)
                if laying.done():
                    laying.result()
                if spoil:
                    _spoil(folder / "checkpoints", random)
            assert await self._life(folder, name, None) == 0, _last_words(folder)
            await laying
            await lay_end(bus, recipe)
            return await self._outcome(bus, folder)
        finally:
            if laying is not None:
                laying.cancel()
                await asyncio.gather(laying, return_exceptions=True)
            await bus.close()

    async def _lay(self, bus: JetStreamBus, recipe: Recipe, seed: int) -> None:
        """Prompts are admitted when there are weights, and not before."""
        while not (await bus.info(WEIGHTS)).messages:
            await asyncio.sleep(LOOK_S)
        await lay_log(bus, recipe, seed)

    async def _die(self, folder: Path, name: str, death: dict[str, Any], random: Random) -> None:
        after_s = random.uniform(0.0, OUTSIDE_S) if death["phase"] == OUTSIDE else None
        status = await self._life(folder, name, death, after_s)
        assert status == -signal.SIGKILL, f"it was to die of {death}, but ended with {status}: {_last_words(folder)}"
        if after_s is not None:
            leave_line(folder, OUTSIDE, after_s=after_s)

    async def _life(self, folder: Path, name: str, death: dict[str, Any] | None, after_s: float | None = None) -> int:
        """The life of one trainer, which is killed after so many seconds if given; its exit status."""
        pid = await asyncio.to_thread(self._forks.start, folder, name, self._url, death)
        ended = asyncio.create_task(asyncio.to_thread(self._forks.ended))
        try:
            await asyncio.wait([ended], timeout=LIFE_WAIT_S if after_s is None else after_s)
            assert ended.done() or after_s is not None, f"{death} took over {LIFE_WAIT_S} s: {_last_words(folder)}"
        finally:
            if not ended.done():
                os.kill(pid, signal.SIGKILL)
        return await ended

    async def _outcome(self, bus: JetStreamBus, folder: Path) -> Outcome:
        deaths = Counter(
            json.loads(line)["phase"] for file in folder.glob(DEATHS) for line in file.read_text().splitlines()
        )
        checkpoint = load_newest(folder / "checkpoints")
        assert checkpoint is not None
        return Outcome(
            weights=await _all(bus, WEIGHTS),
            steps=await _all(bus, STEPS),
            model={path.name: path.read_bytes() for path in (folder / "model").iterdir()},
            checkpoint=checkpoint,
            leftovers=[str(path.relative_to(folder)) for path in folder.rglob(".*")],
            audit=await audit_run(folder),
            deaths=deaths,
        )


async def _all(bus: JetStreamBus, stream: Stream) -> list[Any]:
    return [entry.message() async for entry in read_to_end(bus, stream)]


def _spoil(checkpoints: Path, random: Random) -> None:
    """Damage no checkpoint, the newest or all, each as likely."""
    newest_first = sorted(checkpoints.glob("step-*"), reverse=True)
    for path in newest_first[: random.choice([0, 1, len(newest_first)])]:
        for file in path.iterdir():
            os.truncate(file, random.randrange(file.stat().st_size or 1))


def _last_words(folder: Path) -> str:
    return "".join((folder / "logs" / f"trainer.{kind}").read_text()[-3000:] for kind in ("jsonl", "out"))
