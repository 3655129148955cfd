"""`rollstream scale` on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.commands.options import NatsUrl, NoDirNorRun, RunName, finish


def scale(
    arguments: Annotated[
        list[str], typer.Argument(metavar="[RUN] ROLE=N...", help="A run, by default the newest, and numbers.")
    ],
    nats: NatsUrl = None,
    run_name: RunName = None,
    _: NoDirNorRun = None,
) -> None:
    """Change the number of rollout, reward or episode workers on the machine where `run` goes on. Others join by `up`.

    Workers that leave hand their unfinished samples over. The number holds until the next `scale`, and when the run is
    resumed, unless the recipe then asks for another one than before.

    ```
    rollstream scale rollout=4
    rollstream scale runs/running-total-20250101-120000 rollout=2 reward=3
    rollstream scale episode=2
    rollstream scale --nats nats://user:password@host:4222 --run-name running-total-20250101-120000 rollout=6
    ```
    """
    from ops import scale as command
    from ops.logging import configure

    configure()
    finish(command.main(arguments, nats, run_name))
