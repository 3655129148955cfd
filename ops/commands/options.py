"""What several commands of `cli` take, and how they end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Coroutine

NatsUrl = Annotated[str | None, typer.Option("--nats", help="An existing NATS server, nats://user:password@host:port.")]
RunName = Annotated[str | None, typer.Option("--run-name", help="The run's name on that server.")]
LogTarget = Annotated[
    str | None, typer.Argument(metavar="[RUN_OR_FILE]", help="A run, or a recording's file; by default the newest run.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs, instead of tables.")]


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
