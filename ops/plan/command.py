"""`rollstream plan`: what a person asks becomes a workload and speeds, and the plan is told."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.status import Status

from actors.controller.config import ControllerConfig
from ops.plan.cluster import Workload
from ops.plan.hardware import Hardware, hardware_text, load_hardware
from ops.plan.lengths import FORMS, Lengths, parse_lengths
from ops.plan.measured import Measured, measure_run
from ops.plan.outcome import simulate
from ops.plan.report import plot, render, share
from ops.plan.search import Plan, Progress, make_plan, with_bound
from ops.plan.speeds import Speeds
from ops.recipe import Recipe, load_recipe
from schemas import UserError

REFERENCE = 8  # η under which splits are compared, where no recipe says another
DEVICES_MAX = 16_384
BOUND_MAX = 1024
GROWTH_MAX = 100.0


@dataclasses.dataclass(frozen=True)
class Asked:
    """The command line as it was written; see `cli.plan` for what each means."""

    recipe: Path | None
    overrides: tuple[str, ...]
    devices: int
    hardware: str | None
    lengths: str | None
    run: str | None
    staleness: str
    split: str
    batch: str | None
    growth: float
    uninformative: float
    seed: int
    as_json: bool
    image: Path | None


async def main(asked: Asked) -> int:
    """Plan and tell. Raises `UserError` for whatever cannot be."""
    if not 1 <= asked.devices <= DEVICES_MAX:
        raise UserError(f"--devices {asked.devices}: between 1 and {DEVICES_MAX}.", "Count the whole cluster.")
    if not 1 / GROWTH_MAX <= asked.growth <= GROWTH_MAX:
        raise UserError(f"--grow {asked.growth:g}: a factor up to {GROWTH_MAX:g}.", "1.5 is half as long again.")
    bounds = parse_bounds(asked.staleness)
    split = None if asked.split == "auto" else parse_pair(asked.split, ":", "--split", "48:16")
    measured = await measure_run(asked.run) if asked.run is not None else None
    recipe = load_recipe(asked.recipe, asked.overrides) if asked.recipe else measured.recipe if measured else None
    lengths = _lengths(asked, measured)
    workload = _workload(recipe, lengths, asked.batch, asked.uninformative)
    reference = workload.controller.max_staleness
    if reference not in bounds:
        reference = max(bounds)
    hardware = _hardware(asked, measured)

    def plan_for(workload: Workload, progress: Progress) -> Plan:
        speeds = with_slots(hardware.speeds_for(workload.lengths), recipe)
        return make_plan(speeds, workload, asked.devices, bounds, reference, split, asked.seed, progress)

    with _telling() as progress:
        plan = plan_for(workload, progress)
        grown = None
        if asked.growth != 1:
            longer = dataclasses.replace(workload, lengths=lengths.scaled(asked.growth))
            grown = plan_for(longer, progress)
    if asked.as_json:
        print(json.dumps(plan.to_json() | ({"grown": grown.to_json()} if grown else {})))
    else:
        _tell(plan, grown, asked)
    if asked.image is not None:
        plot(plan, asked.image)
    return 0


def show_hardware(name: str) -> None:
    """Print a hardware file, to begin one's own from."""
    print(hardware_text(name), end="")


def _tell(plan: Plan, grown: Plan | None, asked: Asked) -> None:
    console = Console()
    console.print(render(plan, console.width))
    if grown is None:
        return
    console.print()
    console.print(render(grown, console.width))
    first = plan.best
    kept = simulate(grown.speeds, with_bound(grown.workload, grown.reference), first.rollout, first.train, asked.seed)
    part = kept.tokens_per_s / grown.bounds_at(grown.reference).tokens_per_s
    console.print(
        f"When answers are {asked.growth:g} times as long, {first.rollout}:{first.train} still gives "
        f"{share(min(1.0, part))} of what {grown.best.rollout}:{grown.best.train} gives then."
    )


def _hardware(asked: Asked, measured: Measured | None) -> Hardware:
    if asked.hardware is not None:
        return load_hardware(asked.hardware)
    if measured is not None:
        return measured.hardware
    raise UserError(
        "There are no speeds to plan with.", "Give --hardware with a preset or a file, or --from a recorded run."
    )


def _lengths(asked: Asked, measured: Measured | None) -> Lengths:
    if asked.lengths is not None:
        return parse_lengths(asked.lengths)
    if measured is not None:
        return measured.lengths
    raise UserError("How long are the answers? There are no lengths to plan with.", f"{FORMS} Or --from a run.")


def _workload(recipe: Recipe | None, lengths: Lengths, batch: str | None, uninformative: float) -> Workload:
    """What the recipe says, else the controller's defaults; with the batch that is given."""
    config = recipe.controller if recipe else ControllerConfig(max_staleness=REFERENCE)
    if batch is not None:
        groups, size = parse_pair(batch, "x", "--batch", "512x16")
        try:
            config = ControllerConfig(**config.model_dump() | {"batch_groups": groups, "group_size": size})
        except ValidationError as error:
            raise UserError(f"--batch {batch}: {error.errors()[0]['msg']}.", "Write --batch 512x16.") from None
    if uninformative == 1 and config.filter == "zero_variance":
        raise UserError(
            "--uninformative 1 with controller.filter zero_variance: all groups would be dropped, no batch would fill.",
            "Give the share of prompts that are always or never solved, below 1.",
        )
    return Workload(lengths, config, uninformative, recipe.rollout.on_update if recipe else "recompute")


def with_slots(speeds: Speeds, recipe: Recipe | None) -> Speeds:
    """No more slots than the recipe asks for, if it says how many."""
    if recipe is None or "slots" not in recipe.rollout.model_fields_set:
        return speeds
    return speeds.model_copy(update={"slots": min(speeds.slots, recipe.rollout.slots)})


def parse_pair(text: str, sign: str, option: str, example: str) -> tuple[int, int]:
    """`"48:16"` with the sign ":" is (48, 16). Raises `UserError`."""
    first, _, second = text.partition(sign)
    try:
        return int(first), int(second)
    except ValueError:
        raise UserError(f"{option} {text!r} is not of the form {example}.", "Give two whole numbers.") from None


def parse_bounds(text: str) -> tuple[int, ...]:
    """`"0,4,8"` is (0, 4, 8). Raises `UserError`."""
    remedy = "Write --staleness 0,4,8."
    try:
        bounds = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--staleness {text!r} is no list of whole numbers.", remedy) from None
    if not all(0 <= bound <= BOUND_MAX for bound in bounds):
        raise UserError(f"--staleness {text}: η lies between 0 and {BOUND_MAX}.", remedy)
    return bounds


@contextlib.contextmanager
def _telling() -> Iterator[Progress]:
    """What is being simulated, on a terminal."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield lambda what: None
        return
    with Status("", console=errors) as status:
        yield lambda what: status.update(f"simulating {what}")
