"""`rollstream bench` on the command line. Each command imports what it needs, so that `--help` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ops.commands.options import BenchDir, Overrides, RecipePath, ReportFile, finish

bench = typer.Typer(help="Measure. Each benchmark is one command and prints a table.", no_args_is_help=True)

WarmModel = Annotated[
    Path | None, typer.Option("--warm", help="The warm-started model's folder; by default it is made.")
]


@bench.command("async")
def bench_async(
    steps: Annotated[int, typer.Option("--steps", min=4, help="Of each run with the quick reward.")] = 40,
    slow_steps: Annotated[int, typer.Option("--slow-steps", min=4, help="Of each run with the slow one.")] = 30,
    warm: WarmModel = None,
    out: ReportFile = None,
    folder: BenchDir = None,
) -> None:
    """Time the same recipe at staleness bound 0 and 4, with a quick and with a slow reward.

    ```
    rollstream bench async
    rollstream bench async --out docs/bench-async.md
    ```
    """
    from ops import bench as command

    finish(command.bench_async(steps, slow_steps, warm, out, folder))


@bench.command("cost")
def bench_cost(
    steps: Annotated[int, typer.Option("--steps", min=2, help="Batches, of each contender.")] = 60,
    warm: WarmModel = None,
    out: ReportFile = None,
    folder: BenchDir = None,
) -> None:
    """Count the CPU seconds of a batch, all processes together, beside a plain loop and TRL.

    TRL takes part if it is installed: pip install 'rollstream[bench]'

    ```
    rollstream bench cost
    rollstream bench cost --steps 80 --out docs/bench-cost.md
    ```
    """
    from ops import bench_cost as command

    finish(command.bench_cost(steps, warm, out, folder))


@bench.command("engines")
def bench_engines(
    model: Annotated[
        Path | None, typer.Option("--model", help="A folder as transformers writes it; by default SmolLM2-135M.")
    ] = None,
    batches: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="A batch of so many; repeatable. By default 1, 16, 64.")
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new", min=1, help="Tokens of each answer in them.")] = 64,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Of the long-tailed workload.")] = 96,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Decoded together of those.")] = 16,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each engine.")] = 2,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option("--dtype", help="Of the weights.")] = "bfloat16",
    out: ReportFile = None,
) -> None:
    """Count tokens per second of the built-in engine, of vLLM if it is installed, and of a padded `generate`.

    ```
    rollstream bench engines
    rollstream bench engines --model my/model --batch 1 --batch 8 --out engines.md
    ```
    """
    from ops import bench_engines as command

    finish(command.bench_engines(model, batches or command.BATCHES, new_tokens, samples, slots, rounds, dtype, out))


@bench.command("staleness")
def bench_staleness(
    recipe: RecipePath,
    overrides: Overrides = None,
    bounds: Annotated[
        str, typer.Option("--eta", metavar="N,N,...", help="How many versions old every batch is.")
    ] = "0,1,2,4,8,16",
    live: Annotated[
        str, typer.Option("--live", metavar="N,N,...", help="Bounds to run the whole system at; 'none' for none.")
    ] = "4,16",
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=10, help="Each with a warm start of its own.")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of each run.")] = 60,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at the same time, in a process each.")] = 2,
    folder: Annotated[
        Path, typer.Option("--dir", help="Where runs are kept; given again, only missing ones are made.")
    ] = Path("runs/bench-staleness"),
    out: ReportFile = None,
) -> None:
    """Train on samples that are η versions old, with naive PPO and with decoupled PPO.

    A table and, beside the file of --out, a plot. Interrupted and given again, it goes on where it was.

    ```
    rollstream bench staleness recipes/running_total.yaml --out docs/bench-staleness.md
    rollstream bench staleness recipes/running_total.yaml trainer.lr=1e-3 --eta 0,8 --live none --dir runs/faster
    ```
    """
    from ops import bench_staleness as command

    finish(
        command.bench_staleness(
            recipe,
            overrides or (),
            bounds=command.numbers(bounds, "--eta"),
            live=command.numbers(live, "--live"),
            seeds=seeds,
            steps=steps,
            jobs=jobs,
            folder=folder,
            out=out,
        )
    )


@bench.command("packing")
def bench_packing(
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", min=3, help="Of training, whose batches are packed.")] = 30,
    warm: WarmModel = None,
    out: ReportFile = None,
) -> None:
    """Measure padding, time and memory of packed batches beside padded ones, and memory by number of micro-batches.

    ```
    rollstream bench packing recipes/running_total.yaml
    rollstream bench packing recipes/running_total.yaml --out docs/bench-packing.md
    ```
    """
    from ops import bench_packing as command

    finish(command.bench_packing(recipe, overrides or (), steps=steps, warm=warm, out=out))


@bench.command("soak")
def bench_soak(
    recipe: RecipePath,
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option("--minutes", min=0.5, help="How long workers come and go.")] = 10.0,
    seed: Annotated[int, typer.Option("--seed", help="Of who joins and leaves, when and how.")] = 0,
    out: ReportFile = None,
    folder: BenchDir = None,
) -> None:
    """Let rollout workers join, leave and be killed all the time, and watch age, waste, memory and the log.

    Exit status 1 if tokens get too old, too many are discarded, memory grows, or the audit finds anything.

    ```
    rollstream bench soak recipes/running_total.yaml
    rollstream bench soak recipes/running_total.yaml --minutes 2 --seed 3 --out docs/bench-soak.md
    ```
    """
    from ops.soak.command import Soak, soak

    finish(soak(Soak(recipe, tuple(overrides or ()), minutes, seed, out, folder)))


@bench.command("weights")
def bench_weights(
    size: Annotated[float, typer.Option("--size", min=0.001, max=16, help="GB that go over the bus.")] = 1.0,
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Of the road over the bus; 0 leaves it out.")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=0, help="GRPO steps before deltas; 0 leaves them out.")] = 5,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="Whose model is trained; by default SmolLM2-135M.")
    ] = None,
    out: ReportFile = None,
) -> None:
    """Size and time of deltas on a real model, and the road for weights over the bus beside the client's own.

    Needs 6 GB of memory, and a few minutes for the steps.

    ```
    rollstream bench weights --out docs/bench-weights.md
    rollstream bench weights --steps 0 --size 0.2
    rollstream bench weights --rounds 0 --recipe recipes/running_total.yaml
    ```
    """
    from ops import bench_weights as command

    finish(command.bench_weights(size, rounds, steps, recipe, out))


@bench.command("sandbox")
def bench_sandbox(
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Runs of each program by each.")] = 20,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Of each run without a pause.")] = 10.0,
    out: ReportFile = None,
) -> None:
    """Time programs in the sandbox beside a bare Python that runs the same.

    ```
    rollstream bench sandbox
    rollstream bench sandbox --out docs/bench-sandbox.md
    ```
    """
    from ops import bench_sandbox as command

    finish(command.bench_sandbox(rounds, seconds, out))


@bench.command("swap")
def bench_swap(
    model: Annotated[
        Path | None, typer.Option("--model", help="A folder as transformers writes it; by default SmolLM2-135M.")
    ] = None,
    updates: Annotated[int, typer.Option("--updates", min=1, help="Versions that one worker takes.")] = 8,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Sequences that each worker decodes together.")] = 16,
    on_update: Annotated[
        Literal["both", "keep", "recompute"],
        typer.Option("--on-update", help="Keep the KV cache, or rebuild it; by default one after the other."),
    ] = "both",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option("--dtype", help="Of the workers' weights.")
    ] = "float32",
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Of each phase in which one is watched.")] = 20.0,
    out: ReportFile = None,
) -> None:
    """Time how long new weights stop the worker that takes them, and watch another one meanwhile.

    ```
    rollstream bench swap --out docs/bench-swap.md
    rollstream bench swap --model my/model --on-update recompute
    ```
    """
    from ops import bench_swap as command

    ways = ["keep", "recompute"] if on_update == "both" else [on_update]
    finish(command.bench_swap(model, updates, slots, ways, dtype, seconds, out))
