"""How a trainer dies in a phase: functions of the product are wrapped, and a passage through one of them is the last.

Nothing in the product knows of it. `arm` is called in a process that is about to become a trainer.
"""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

DEATHS = "deaths.jsonl"  # in the run's folder: a line by each that dies here
OUTSIDE = "outside"

# Each is passed once a step, once a version, or once a checkpoint, at least.
STEP_PHASES = (
    "fetch asked",
    "fetched",
    "step begun",
    "forward",
    "proximal computed",
    "backward",
    "optimizer about to step",
    "optimizer stepped",
    "trained",
    "weights half written",
    "weights not renamed",
    "weights renamed",
    "version not announced",
    "version not acknowledged",
    "versions collected",
    "step not announced",
    "step not acknowledged",
    "checkpoint half written",
    "manifest half written",
    "checkpoint not renamed",
    "checkpoint renamed",
    "checkpoint half pruned",
    "checkpoint saved",
    "restored",
)
EARLIEST = {"checkpoint half pruned": 8}  # by then there are as many as stay
PASSAGES = {"forward": 5, "backward": 5, "optimizer about to step": 2, "optimizer stepped": 2}  # a step
# Once in a run, behind its last step. The last one needs a model of an earlier export that died.
EXPORT_PHASES = ("model half exported", "model not renamed", "model exported", "model removed for another")
# One whose phase does not come dies after so many steps anyway, so that the hunt has steps left: three to catch up with
# what is published, three until a checkpoint.
FREE_STEPS_MAX = 7


class Death:
    """The death that a process is to die: at the `passage`-th passage of `phase`, counted from `step` on.

    With phase "outside" it is somebody else's hand: from `step` on the process waits for it, so as not to run away.
    """

    def __init__(self, folder: Path, phase: str, step: int, passage: int = 1) -> None:
        self.folder = folder
        self.phase = phase
        self.step = step
        self.now = -1  # the step that was begun last
        self._left = passage
        self._free = FREE_STEPS_MAX

    def passes(self, phase: str) -> bool:
        """Whether this is the last passage."""
        if phase != self.phase or self.now < self.step:
            return False
        self._left -= 1
        return self._left <= 0

    def at(self, phase: str) -> None:
        """Die here, if it is the place."""
        if self.passes(phase):
            self.die(phase)

    def die(self, phase: str) -> None:
        """Leave a line about it, and no chance to anything else."""
        leave_line(self.folder, phase, step=self.now)
        os.kill(os.getpid(), signal.SIGKILL)

    def begin(self, step: int) -> None:
        """A step begins."""
        self.now = step
        if self.phase == OUTSIDE and step > self.step:
            time.sleep(120)
        self._free -= step >= self.step
        if self.phase in STEP_PHASES and self._free < 0:
            self.die("step begun")
        self.at("step begun")


def leave_line(folder: Path, phase: str, **more: Any) -> None:
    """Tell of a death."""
    with open(folder / DEATHS, "a") as file:
        file.write(json.dumps({"phase": phase, **more}) + "\n")


def arm(death: Death) -> None:
    """Wrap what a trainer passes through."""
    _arm_learner(death)
    _arm_files(death)
    _arm_bus(death)


def _around(death: Death, owner: Any, name: str, before: str = "", after: str = "") -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if before:
            death.at(before)
        result = original(*arguments, **options)
        if after:
            death.at(after)
        return result

    setattr(owner, name, wrapped)


def _arm_learner(death: Death) -> None:
    import torch

    from actors.trainer import learner
    from actors.trainer.optimizer import Optimizer

    step, load = learner.Learner.step, learner.Learner.load_state_dict

    def stepped(self: Any, number: int, samples: Any) -> Any:
        death.begin(number)
        metrics = step(self, number, samples)
        death.at("trained")
        return metrics

    def loaded(self: Any, state: Any) -> None:
        load(self, state)
        death.now = self.steps_done - 1
        death.at("restored")

    learner.Learner.step = stepped  # type: ignore[method-assign]
    learner.Learner.load_state_dict = loaded  # type: ignore[method-assign]
    _around(death, learner, "response_logprobs", after="forward")
    _around(death, learner.Learner, "_proximal", after="proximal computed")
    _around(death, torch.Tensor, "backward", after="backward")
    _around(death, torch.optim.AdamW, "step", before="optimizer about to step")
    _around(death, Optimizer, "update", after="optimizer stepped")


def _arm_files(death: Death) -> None:
    import torch

    from actors.trainer.checkpoint import Checkpoints
    from bus.weights import WeightStore
    from ops.text import HfTokenizer

    save, dump, rename, rmtree, fsync = torch.save, json.dump, os.rename, shutil.rmtree, os.fsync

    def half_saved(state: Any, file: Any) -> None:
        if death.passes("checkpoint half written"):
            whole = io.BytesIO()
            save(state, whole)
            file.write(whole.getvalue()[: whole.tell() // 2])
            file.flush()
            death.die("checkpoint half written")
        save(state, file)

    def half_dumped(told: Any, file: Any) -> None:
        if death.passes("manifest half written"):
            text = json.dumps(told)
            file.write(text[: len(text) // 2])
            file.flush()
            death.die("manifest half written")
        dump(told, file)

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.parent.name == "weights" and path.name.startswith(".tmp-") and death.passes("weights half written"):
            os.truncate(path, os.path.getsize(path) // 2)
            death.die("weights half written")
        fsync(descriptor)

    def renamed(source: Any, target: Any, **options: Any) -> None:
        what = {"checkpoints": "checkpoint", "weights": "weights"}.get(Path(target).parent.name, Path(target).name)
        death.at(f"{what} not renamed")
        rename(source, target, **options)
        death.at("model exported" if what == "model" else f"{what} renamed")

    def removed(path: Any, *arguments: Any, **options: Any) -> None:
        path = Path(path)
        if path.name.startswith("step-") and death.passes("checkpoint half pruned"):
            next(path.iterdir()).unlink()
            death.die("checkpoint half pruned")
        rmtree(path, *arguments, **options)
        if path.name == "model":
            death.at("model removed for another")

    torch.save, json.dump, os.rename = half_saved, half_dumped, renamed  # type: ignore[assignment]
    shutil.rmtree, os.fsync = removed, synced  # type: ignore[assignment]
    _around(death, Checkpoints, "save", after="checkpoint saved")
    _around(death, WeightStore, "collect", after="versions collected")
    _around(death, HfTokenizer, "save", before="model half exported")


def _arm_bus(death: Death) -> None:
    from bus.connection import Connection
    from bus.jetstream import JetStreamBus
    from bus.table import ROLLOUTS
    from schemas import StepDone, WeightVersion

    get, publish_fenced, request = JetStreamBus.get, JetStreamBus.publish_fenced, Connection.request

    async def fetched(self: Any, stream: Any, seqs: Any) -> Any:
        if stream is ROLLOUTS:
            death.at("fetch asked")
        entries = await get(self, stream, seqs)
        if stream is ROLLOUTS:
            death.at("fetched")
        return entries

    async def published(self: Any, messages: Any, last_seq: int) -> Any:
        for kind, phase in ((WeightVersion, "version not announced"), (StepDone, "step not announced")):
            if isinstance(messages[0], kind):
                death.at(phase)
        return await publish_fenced(self, messages, last_seq)

    async def requested(self: Any, subject: str, *arguments: Any, **options: Any) -> Any:
        reply = await request(self, subject, *arguments, **options)
        for ending, phase in ((".weights", "version not acknowledged"), (".steps", "step not acknowledged")):
            if subject.endswith(ending):
                death.at(phase)
        return reply

    JetStreamBus.get = fetched  # type: ignore[method-assign]
    JetStreamBus.publish_fenced = published  # type: ignore[method-assign]
    Connection.request = requested  # type: ignore[method-assign]
