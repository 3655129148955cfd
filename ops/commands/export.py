"""The command of `cli` that takes a model out of a run. As there, it imports what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ops.commands.options import finish


def export(
    target: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run's folder or name; or the newest.")
    ] = None,
    version: Annotated[
        str, typer.Option("--version", metavar="best|last|N", help="The best by evaluation, the newest, or a number.")
    ] = "last",
    out: Annotated[Path, typer.Option("--out", help="The new folder, for from_pretrained.")] = Path("model"),
) -> None:
    """Write a version of a run, ended or going on, as a Hugging Face model that from_pretrained loads.

    A new run begins with it if its recipe's model.path names the folder.

    ```
    rollstream export --version best --out best-model
    rollstream export runs/running-total-20250101-120000 --version 40 --out at-40
    rollstream run recipes/running_total.yaml model.make=null model.path=best-model sft=null
    ```
    """
    from ops import export as command
    from ops.logging import configure

    configure(console=False)
    finish(command.main(target, version, out))
