"""The trainer as a job of several ranks on one machine: torchrun, started and ended as one process.

```
supervisor ── the trainer's process, which waits here ── torchrun ─┬─ rank 0: publishes, saves
                                                                   └─ rank 1 …
```
A rank that dies ends the job, and the supervisor starts it again: from the newest checkpoint, as after any crash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from actors import clock
from ops.host import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR, ProcessSpec
from ops.recipe import Recipe
from ops.supervise import die_with_parent

PROCESS = "ROLLSTREAM_TRAINER_PROCESS"  # host:pid that rank 0 beats for, so that the supervisor hears its child


def run_job(spec: ProcessSpec, recipe: Recipe) -> int:
    """Run all ranks to their end; returns one of the `EXIT_` codes."""
    file = write_job(spec)
    for rank in range(recipe.trainer.ranks):
        rank_spec(spec, rank).error_file.unlink(missing_ok=True)
    stopped = False
    job = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
            *(f"--nproc-per-node={recipe.trainer.ranks}", "--module", "ops.trainer_rank", "--job", str(file)),
        ],
        env={
            "OMP_NUM_THREADS": str(recipe.trainer.threads),
            "GLOO_SOCKET_IFNAME": "lo",
            **os.environ,
            PROCESS: clock.process(),
        },
        start_new_session=True,  # Ctrl-C reaches the launcher, which has all end in order
        preexec_fn=die_with_parent,
    )

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        with contextlib.suppress(ProcessLookupError):
            job.terminate()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    status = job.wait()
    for rank in range(recipe.trainer.ranks):
        error_file = rank_spec(spec, rank).error_file
        if error_file.exists():
            if rank:
                os.replace(error_file, spec.error_file)
            return EXIT_USER_ERROR
    if status == 0:
        return EXIT_DONE
    return EXIT_STOPPED if stopped else EXIT_FAILED


def rank_spec(spec: ProcessSpec, rank: int) -> ProcessSpec:
    """The process of one rank: rank 0 has the trainer's own name."""
    ((role, name),) = spec.actors
    return dataclasses.replace(spec, actors=((role, name if rank == 0 else f"{name}-rank{rank}"),))


def read_job(file: Path) -> ProcessSpec:
    """What `write_job` has written."""
    told = json.loads(file.read_text())
    ((role, name),) = told["actors"]
    return ProcessSpec(((role, name),), told["run"], told["url"], Path(told["folder"]), told["recipe_yaml"])


def write_job(spec: ProcessSpec) -> Path:
    """Tell the ranks their run in a file of its folder. It holds the server's credential, so it is private."""
    file = spec.folder / "logs" / f"{spec.name}.job.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.write_text(json.dumps(dataclasses.asdict(spec) | {"folder": str(spec.folder)}))
    return file
