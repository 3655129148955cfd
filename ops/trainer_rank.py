"""One rank of a trainer, as torchrun, Slurm or any other launcher starts it.

```
torchrun --nproc-per-node 2 -m ops.trainer_rank runs/my-run
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 \\
    -m ops.trainer_rank --nats nats://user:password@host:4222 --run-name my-run
```
The run must have been started with `trainer.ranks=0`, which leaves its trainer to you, and every rank must see the
run's folder. A launcher that is to restart the job after a crash (`--max-restarts 3`) may: the ranks begin at the
newest checkpoint. A rank exits with 0 when the run is done, with 2 and a sentence if only you can mend what is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

from actors import clock
from ops.host import ProcessSpec
from ops.host import main as host_main
from ops.supervise import die_with_parent
from ops.trainer_job import PROCESS, rank_spec, read_job
from schemas import UserError


class _RankClock(clock.SystemClock):
    """Of rank 0 of a job of ours: it beats for the process that the supervisor watches."""

    def process(self) -> str:
        return os.environ[PROCESS]


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and live the life of a rank."""
    parser = argparse.ArgumentParser(prog="torchrun -m ops.trainer_rank", description=__doc__.split("\n")[0])
    parser.add_argument("run", nargs="?", type=Path, help="the run's folder")  # torchrun takes --run for its own
    parser.add_argument("--nats", help="the URL of the run's server")
    parser.add_argument("--run-name", help="the run's name on that server")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    if given.job is not None:
        die_with_parent()
        spec = read_job(given.job)
        if rank == 0:
            clock.use(_RankClock())
    else:
        try:
            spec = asyncio.run(_found(given.run, given.nats, given.run_name))
        except UserError as error:
            print(f"{error.message} {error.remedy}", file=sys.stderr, flush=True)
            sys.exit(2)
    host_main(rank_spec(spec, rank))


async def _found(folder: Path | None, nats: str | None, run: str | None) -> ProcessSpec:
    from bus.jetstream import JetStreamBus
    from ops.launch import locate, start_of

    where = locate(folder, run, nats)
    bus = JetStreamBus(where.run, where.url, "trainer")
    await bus.connect()
    try:
        start = await start_of(bus, where.run)
    finally:
        await bus.close()
    if folder is None:
        where = replace(where, folder=Path(start.detail))
    return ProcessSpec((("trainer", "trainer"),), where.run, where.url, where.folder, start.recipe)


if __name__ == "__main__":
    main()
