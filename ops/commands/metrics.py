"""The command of `cli` that writes metrics for other programs. As there, it imports what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ops.commands.options import LogTarget, finish


def metrics(
    target: LogTarget = None,
    jsonl: Annotated[
        str | None, typer.Option("--jsonl", metavar="FILE", help="JSON lines; - is the terminal, and the default.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="FOLDER", help="TensorBoard's event files.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
) -> None:
    """Write the metrics of every step and evaluation of a run, or of a recording. docs/metrics.md says what each is.

    What the file or folder holds already is not written again. A run writes its own metrics.jsonl anyway.

    ```
    rollstream metrics | jq '{step, reward, ess, idle_fraction}'
    rollstream metrics runs/running-total-20250101-120000 --tensorboard tb --follow
    rollstream metrics bug.rollstream --jsonl bug.jsonl
    ```
    """
    from ops.logging import configure
    from ops.metrics import command

    configure(console=False)
    finish(command.main(target, jsonl, tensorboard, follow))
