"""The commands of `cli` that feed a log back or look into it. As there, each imports what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ops.commands.options import AsJson, LogTarget, NatsUrl, RunName, finish

replay = typer.Typer(
    help="Feed a recorded log back: into a trainer, into the reward function, or into a fresh bus.",
    no_args_is_help=True,
)

LogAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN_OR_FILE] [KEY=VALUE]", help="A run or a recording, and changes to its recipe."),
]
FromStep = Annotated[int, typer.Option("--from", min=0, metavar="STEP", help="The first step.")]
ToStep = Annotated[int | None, typer.Option("--to", min=1, metavar="STEP", help="The first step that is left out.")]


@replay.command("trainer")
def replay_trainer(
    arguments: LogAndOverrides = None,
    start: FromStep = 0,
    stop: ToStep = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new folder for curves and model; with changes replays/TIME.")
    ] = None,
    rescore: Annotated[bool, typer.Option("--rescore", help="Ask the reward function again.")] = False,
) -> None:
    """Train on the recorded batches again; neither an engine nor the reward function is needed.

    As recorded, every weight version must be bit-identical, else the first that differs is named and the status is 1.
    With changes both curves are told, step by step; the data stay those of the recorded policy.

    ```
    rollstream replay trainer runs/running-total-20250101-120000
    rollstream replay trainer bug.rollstream trainer.loss=ppo --from 412
    rollstream replay trainer bug.rollstream trainer.advantage.std=none controller.max_staleness=1
    rollstream replay trainer bug.rollstream reward.function=mended.py:score --rescore
    ```
    """
    from ops.logging import configure
    from ops.replay import into_trainer
    from ops.replay.changes import split_arguments

    configure(console=False)
    finish(into_trainer.main(*split_arguments(arguments or []), start, stop, out, rescore))


@replay.command("reward")
def replay_reward(
    arguments: LogAndOverrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="A file for all verdicts, old and new, as JSONL.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit status 1 if a verdict changed.")] = False,
) -> None:
    """Score every recorded answer again, and list every verdict that changed.

    ```
    rollstream replay reward runs/running-total-20250101-120000
    rollstream replay reward bug.rollstream reward.function=mended.py:score --out verdicts.jsonl
    ```
    """
    from ops.logging import configure
    from ops.replay import into_reward
    from ops.replay.changes import split_arguments

    configure(console=False)
    finish(into_reward.main(*split_arguments(arguments or []), out, check))


@replay.command("bus")
def replay_bus(
    target: LogTarget = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="The fresh run's folder; by default runs/NAME-replay-TIME.")
    ] = None,
    nats: NatsUrl = None,
    run_name: RunName = None,
    speed: Annotated[str, typer.Option("--speed", help="Times as fast as recorded, or max.")] = "max",
    start: Annotated[int, typer.Option("--from", min=0, metavar="STEP", help="What is before comes at once.")] = 0,
    stop: ToStep = None,
    streams: Annotated[
        str | None, typer.Option("--streams", help="Some only, such as control,prompts,weights.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Keep the server up until Ctrl-C, for actors to join.")
    ] = False,
) -> None:
    """Lay a log down in a fresh run: the same bytes at the same sequences, at any pace, up to any step.

    Without --nats on a private server in the new run's folder. To meet a bug again, let real actors go on from there:

    ```
    rollstream replay bus bug.rollstream --to 412 --dir runs/at-412
    rollstream run my.yaml --resume --dir runs/at-412
    rollstream replay bus bug.rollstream --streams control,prompts,rollouts,weights --speed 2 --serve
    ```
    """
    from ops.logging import configure
    from ops.replay import into_bus

    configure(console=False)
    finish(into_bus.main(target, folder, nats, run_name, speed, start, stop, streams, serve))


def trace(
    wanted: Annotated[str, typer.Argument(metavar="ID", help="12-3: a sample; 12: its group; step:7: a step's.")],
    target: LogTarget = None,
    as_json: AsJson = False,
) -> None:
    """Tell one sample's life: prompt, worker, each token by the weights that made it, reward, advantage, step.

    ```
    rollstream trace 12-3
    rollstream trace step:7 bug.rollstream
    rollstream trace 12-3 runs/running-total-20250101-120000 --json
    ```
    """
    from ops import trace as command
    from ops.logging import configure

    configure(console=False)
    finish(command.main(wanted, target, as_json))


def diff(
    target: LogTarget = None,
    start: FromStep = 0,
    stop: ToStep = None,
    worst: Annotated[int, typer.Option("--worst", min=0, max=10_000, help="The worst tokens to tell.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Compare the engine's log-probabilities with the trainer's, token by token, under the weights that made each.

    Exit status 1 if they differ by more than their number formats explain.

    ```
    rollstream diff
    rollstream diff bug.rollstream --from 400 --to 412 --worst 50
    ```
    """
    from ops import diff as command
    from ops.logging import configure

    configure(console=False)
    finish(command.main(target, start, stop, worst, as_json))
