"""`rollstream reward` on the command line."""

from __future__ import annotations

import typer

from ops.commands.options import NatsUrl, RunName, RunTarget, finish

reward = typer.Typer(help="The reward function of a run that is going on.", no_args_is_help=True)


@reward.callback()
def _group() -> None:
    """The reward function of a run that is going on."""


@reward.command()
def reload(target: RunTarget = None, nats: NatsUrl = None, run_name: RunName = None) -> None:
    """Have the reward workers read the reward function's file anew, without stopping the run.

    A file that cannot be loaded is told, and they keep what they have. Each verdict in the log tells the digest of the
    code and options that gave it. Exit status 1 if a worker kept the old function.

    ```
    rollstream reward reload
    rollstream reward reload runs/running-total-20250101-120000
    ```
    """
    from ops import reload as command
    from ops.logging import configure

    configure()
    finish(command.main(target, nats, run_name))
