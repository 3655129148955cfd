"""What several commands of `cli` take, and how they end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Coroutine


def _told_otherwise(context: typer.Context, run: str | None) -> None:
    """The commands take the run in three ways: each tells its own to who gave it in another's."""
    if run is None:
        return
    from schemas import UserError

    command = context.info_name
    if command == "up":
        raise UserError("up takes the run by --run, not by --dir.", f"Write: rollstream up ROLE --run {run}")
    arguments = f"{run} ROLE=N" if command == "scale" else run
    raise UserError(
        f"{command} takes the run as an argument, not by an option.", f"Write: rollstream {command} {arguments}"
    )


RecipePath = Annotated[Path, typer.Argument(help="A recipe: a YAML file, such as recipes/running_total.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]", help="Changes to the recipe, such as trainer.lr=1e-4 steps=20."),
]
NatsUrl = Annotated[str | None, typer.Option("--nats", help="An existing NATS server, nats://user:password@host:port.")]
RunName = Annotated[str | None, typer.Option("--run-name", help="The run's name on that server.")]
NoDir = Annotated[str | None, typer.Option("--dir", hidden=True, is_eager=True, callback=_told_otherwise)]
NoDirNorRun = Annotated[
    str | None, typer.Option("--dir", "--run", hidden=True, is_eager=True, callback=_told_otherwise)
]
LogTarget = Annotated[
    str | None, typer.Argument(metavar="[RUN_OR_FILE]", help="A run, or a recording's file; by default the newest run.")
]
RunTarget = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="A run's folder or name; by default the newest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs, instead of tables.")]
ReportFile = Annotated[Path | None, typer.Option("--out", help="A file for the table, as Markdown.")]
BenchDir = Annotated[
    Path | None, typer.Option("--dir", help="Keep the runs in this new folder; by default they are removed.")
]


def finish(work: Coroutine[Any, Any, int]) -> None:
    """Run a command's coroutine, on uvloop where there is one, and exit with the status that it returns."""
    import asyncio

    try:
        import uvloop
    except ImportError:
        status = asyncio.run(work)
    else:
        status = uvloop.run(work)
    raise typer.Exit(status)
