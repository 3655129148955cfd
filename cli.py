"""The command line: parses, builds, runs; nothing else.

Each command imports what it needs, so that `--help` answers at once: even our own `schemas` brings in numpy.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

# What follows takes half a second: who presses Ctrl-C in it shall not be shown a traceback of some library.
signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"stopped\n"), os._exit(130)))

import typer
import typer.core

from ops.commands.bench import bench
from ops.commands.data import data
from ops.commands.export import export
from ops.commands.metrics import metrics
from ops.commands.options import (
    AsJson,
    BenchDir,
    LogTarget,
    NatsUrl,
    NoDir,
    NoDirNorRun,
    Overrides,
    RecipePath,
    ReportFile,
    RunName,
    RunTarget,
    finish,
)
from ops.commands.replay import diff, replay, trace
from ops.commands.reward import reward
from ops.commands.scale import scale

signal.signal(signal.SIGINT, signal.default_int_handler)


class _Commands(typer.core.TyperGroup):
    """What Ctrl-C ends before it has begun ends with one line."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            ctx.exit(130)


app = typer.Typer(
    name="rollstream",
    cls=_Commands,
    help="Fully asynchronous reinforcement learning for language models on a durable message log.",
    epilog="Begin with: rollstream doctor, then rollstream run recipes/running_total.yaml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")

RunDir = Annotated[Path | None, typer.Option("--dir", help="The run's folder; by default runs/NAME-TIMESTAMP.")]


@app.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    folder: RunDir = None,
    nats: NatsUrl = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest run of this recipe, or --dir.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live screen.")] = False,
) -> None:
    """Train: all actors on this machine, with a live screen; at the end a summary and a plot.

    Ctrl-C drains: samples are handed over, a checkpoint is written. A second Ctrl-C kills. Either way nothing is
    lost, and `--resume` goes on exactly where the run stood.

    ```
    rollstream run recipes/running_total.yaml
    rollstream run recipes/running_total.yaml controller.max_staleness=0 steps=40
    rollstream run recipes/running_total.yaml --resume
    rollstream run my.yaml --nats nats://user:password@host:4222
    ```
    """
    from ops.folders import new_folder, newest_folder
    from ops.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or ())
    if folder is None:
        folder = newest_folder(resolved.name) if resume else new_folder(resolved.name)
    from ops import launch

    finish(launch.run(resolved, folder, resume=resume, nats=nats, plain=plain))


@app.command()
def up(
    role: Annotated[
        Literal["controller", "rollout", "reward", "episode", "trainer", "evaluator"],
        typer.Argument(help="What to add."),
    ],
    run_folder: Annotated[str | None, typer.Option("--run", help="The run's folder or name, on this machine.")] = None,
    nats: NatsUrl = None,
    run_name: RunName = None,
    count: Annotated[int, typer.Option("--count", min=1, max=1024, help="How many of them.")] = 1,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, max=4096, help="Processes of the trainer; trainer.ranks if left out."),
    ] = None,
    _: NoDir = None,
) -> None:
    """Add actors to a run, from any machine that reaches its NATS server. Ctrl-C takes them away again.

    A rollout worker that leaves hands its unfinished samples to the others.

    ```
    rollstream up rollout --run runs/running-total-20250101-120000 --count 2
    rollstream up rollout --nats nats://user:password@host:4222 --run-name running-total-20250101-120000
    rollstream up trainer --run runs/running-total-20250101-120000 --ranks 2   # of a run with trainer.ranks=0
    ```
    """
    from ops.folders import check_together, find_folder

    check_together(nats, run_name, "--run with the run's folder")
    from ops import launch

    folder = find_folder(run_folder) if nats is None else None
    finish(launch.up(role, run_name, nats, folder, count, ranks=ranks))


app.command()(scale)
app.add_typer(reward, name="reward")


@app.command()
def status(
    target: RunTarget = None,
    as_json: AsJson = False,
    nats: NatsUrl = None,
    run_name: RunName = None,
    _: NoDirNorRun = None,
) -> None:
    """Tell how a run stands: steps, streams, queues, and every actor that is up.

    ```
    rollstream status
    rollstream status running-total-20250101-120000 --json
    ```
    """
    from ops import status as command
    from ops.logging import configure

    configure()
    finish(command.main(target, as_json, nats, run_name))


@app.command()
def record(
    target: RunTarget = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; by default NAME.rollstream.")] = None,
    model: Annotated[
        bool, typer.Option("--model/--no-model", help="With the initial model, which replaying needs.")
    ] = True,
) -> None:
    """Record a run, ended or going on, into one portable file: its log, its recipe and its initial model.

    ```
    rollstream record
    rollstream record runs/running-total-20250101-120000 --out bug.rollstream
    rollstream audit bug.rollstream
    ```
    """
    from ops import record as command

    finish(command.main(target, out, model))


@app.command()
def audit(
    target: LogTarget = None,
    as_json: AsJson = False,
    again: Annotated[bool, typer.Option("--replay", help="Train every step again, and compare the weights.")] = False,
) -> None:
    """Check a run's log, or a recording: bounded staleness, nothing lost, nothing twice.

    Exit status 1 if an invariant is broken or the recording is damaged.

    ```
    rollstream audit runs/running-total-20250101-120000
    rollstream audit bug.rollstream --replay
    ```
    """
    from ops import audit as command
    from ops.logging import configure

    configure(console=False)
    finish(command.main(target, as_json, again))


app.add_typer(replay, name="replay")
app.command()(trace)
app.command()(diff)
app.command()(metrics)
app.command()(export)
app.command()(data)


@app.command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A finished run, or a model's folder.")],
    recipe: Annotated[Path, typer.Option("--recipe", help="The recipe whose held-out problems are asked.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Score a finished run's model, or any other, on the recipe's held-out problems.

    ```
    rollstream eval runs/running-total-20250101-120000 --recipe recipes/running_total.yaml
    rollstream eval ./my-model --recipe recipes/running_total.yaml evaluation.count=1000
    ```
    """
    from ops.folders import model_of
    from ops.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or ())
    model = model_of(target)
    from ops.evaluate import evaluate as score
    from ops.evaluate import in_words
    from ops.evaluate import told as plain
    from ops.logging import configure

    configure()

    async def told() -> int:
        result = await score(resolved, model)
        text = f"held-out reward {in_words(result)}, {result.response_length:.1f} tokens an answer"
        print(json.dumps(plain(result)) if as_json else text)
        return 0

    finish(told())


@app.command()
def chaos(
    recipe: RecipePath,
    overrides: Overrides = None,
    kills: Annotated[
        int, typer.Option("--kills", min=1, help="Processes to kill, over as many runs as it takes.")
    ] = 200,
    seed: Annotated[int, typer.Option("--seed", help="Of who is hit, when and how.")] = 0,
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", help="Hit only this kind of process; repeatable.")
    ] = None,
    nodes: Annotated[
        Literal["1", "3", "5"], typer.Option("--nodes", help="NATS servers; several are a cluster.")
    ] = "1",
    out: ReportFile = None,
    folder: BenchDir = None,
) -> None:
    """Kill and stop random processes of real runs, then audit them. Exit status 1 if anything is lost or twice.

    ```
    rollstream chaos recipes/running_total.yaml
    rollstream chaos recipes/running_total.yaml steps=20 --kills 30 --kind nats --kind trainer
    rollstream chaos recipes/running_total.yaml --kills 30 --nodes 3
    ```
    """
    from ops.chaos.command import Hunt, kinds_of
    from ops.chaos.command import chaos as hunt

    changes = tuple(overrides or ())
    finish(hunt(Hunt(recipe, changes, kills, seed, kinds_of(kinds or ()), int(nodes), out, folder)))


@app.command()
def plan(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe, for its controller and rollout sections.")] = None,
    overrides: Overrides = None,
    devices: Annotated[int, typer.Option("--devices", help="Of the whole cluster.")] = 64,
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="Speeds: a YAML file, or h800-1.5b, -7b, -14b, -32b.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", help="Of answers: mean=9400,p95=24000,max=27648; fixed=512; or a file of numbers."),
    ] = None,
    run: Annotated[str | None, typer.Option("--from", help="Lengths and speeds as this run measured them.")] = None,
    staleness: Annotated[str, typer.Option("--staleness", help="Bounds η to compare.")] = "0,1,2,4,8,16",
    split: Annotated[str, typer.Option("--split", help="Rollout and trainer devices, 48:16, or auto.")] = "auto",
    batch: Annotated[str | None, typer.Option("--batch", help="Groups a step x samples a group: 512x16.")] = None,
    growth: Annotated[float, typer.Option("--grow", help="In the end answers are so many times as long.")] = 1.0,
    uninformative: Annotated[
        float, typer.Option("--uninformative", min=0, max=1, help="Share of groups whose rewards are all equal.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the lengths that are drawn.")] = 0,
    image: Annotated[Path | None, typer.Option("--plot", help="A .png or .svg to draw the plan into.")] = None,
    show_hardware: Annotated[
        str | None, typer.Option("--show-hardware", help="Print a preset, to begin your own file from, and end.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict how fast a cluster would train: how to split its devices, and what each staleness bound would give.

    The production controller runs in virtual time against models of engines and trainer. Half a minute for 64 devices.

    ```
    rollstream plan --devices 64 --hardware h800-1.5b --batch 512x16 --lengths mean=9400,p95=24000,max=27648
    rollstream plan my.yaml --devices 8 --hardware h800-7b --lengths lengths.txt --split 6:2 --staleness 0,4
    rollstream plan --from runs/running-total-20250101-120000 --devices 4
    rollstream plan --show-hardware h800-7b > mine.yaml
    ```
    """
    from ops.plan import command

    if show_hardware is not None:
        command.show_hardware(show_hardware)
        return
    from ops.logging import configure

    configure(console=False)
    asked = command.Asked(
        recipe, tuple(overrides or ()), devices, hardware, lengths, run, staleness, split, batch, growth,
        uninformative, seed, as_json, image,
    )  # fmt: skip
    finish(command.main(asked))


@app.command()
def sft(recipe: RecipePath, overrides: Overrides = None, folder: RunDir = None) -> None:
    """Make the recipe's model, warm-started by its `sft` section, without training it further.

    ```
    rollstream sft recipes/running_total.yaml --dir runs/warm
    ```
    """
    from ops.folders import new_folder
    from ops.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or ())
    from ops.logging import configure
    from ops.prepare import prepare

    configure()
    print(prepare(resolved, folder or new_folder(resolved.name)))


@app.command()
def init(path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("recipe.yaml")) -> None:
    """Write a recipe with every key explained, to start from with your own model, data and reward.

    ```
    rollstream init my.yaml
    ```
    """
    from importlib.resources import files

    from schemas import UserError

    text = files("recipes").joinpath("template.yaml").read_text(encoding="utf-8")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists and is left as it is.", "Name another file.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}.", "Name another file.") from None
    print(f"Wrote {path}. Fill in model, data and reward, then: rollstream run {path}")


@app.command()
def doctor() -> None:
    """Look whether this machine has what a run needs. Exit status 1 if something is missing.

    ```
    rollstream doctor
    ```
    """
    from ops import doctor as command
    from ops.folders import RUNS
    from ops.logging import configure

    configure(console=False)
    raise typer.Exit(command.main(RUNS))


@app.command()
def sim(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many runs.")] = 2000,
    first: Annotated[int, typer.Option("--first", min=0, help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 2,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.01, help="Run for so long instead of --seeds.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Run this one only.")] = None,
    scenario: Annotated[str | None, typer.Option("--scenario", help="Run this one only, as printed before.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="With one run: show all that happened.")] = False,
    regressions: Annotated[Path | None, typer.Option("--regressions", help="Add failing scenarios to it.")] = None,
) -> None:
    """Run all actors in virtual time under faults drawn from a seed, and hold them to every promise.

    No GPU, no server, no network. A seed repeats exactly. A failing one is made small and printed. Exit status 1 if a
    promise was broken.

    ```
    rollstream sim
    rollstream sim --minutes 60 --first 100000 --jobs 8
    rollstream sim --seed 17 --trace
    ```
    """
    from ops.sim import command
    from ops.sim.scenario import Scenario, draw

    if seed is not None or scenario is not None:
        one = draw(seed) if seed is not None else Scenario.from_json(scenario or "")
        raise typer.Exit(command.replay(one, trace))
    raise typer.Exit(command.main(first, seeds, jobs, minutes, regressions))


@app.command()
def version() -> None:
    """Tell the version."""
    from importlib.metadata import version as of

    print(f"rollstream {of('rollstream')}")


def main() -> None:
    """The entry point. A `UserError` becomes one sentence and its remedy on standard error, and exit status 2."""
    _ready_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        from schemas import UserError

        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left would fail again when Python ends
            if error.errno == errno.EPIPE:
                sys.exit(1)  # `| head` has seen enough
            where = error.filename or "the output"
            error = UserError(f"{where} cannot be written: {error.strerror}.", "Free some space, or write elsewhere.")
        if not isinstance(error, UserError):
            raise
        print(f"error: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"  {error.remedy}", file=sys.stderr)
        sys.exit(2)


def _ready_streams() -> None:
    """A stream that is closed is one that nobody reads; what an encoding does not have is shown as `?`."""
    for name in ("stdin", "stdout", "stderr"):  # in this order each takes its own descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115  # for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
