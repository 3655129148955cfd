"""What a person writes becomes speeds and lengths, nonsense is told: a wrong plan looks like a right one."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import cli
from actors.controller.config import ControllerConfig
from bus.memory import MemoryBus, MemoryHub
from ops.log_source import RunLog
from ops.plan.cluster import Workload
from ops.plan.hardware import Hardware, load_hardware, presets
from ops.plan.lengths import observed, parse_lengths
from ops.plan.measured import line, measure
from ops.plan.report import advice, duration, quantity, render
from ops.plan.search import Plan, check_split, make_plan, splits_of
from ops.plan.speeds import Speeds
from schemas import UserError
from tests.ops.plan_twin import run_twin

SPEEDS = """
speeds: {slots: 8, decode_base_s: 0.05, decode_row_s: 0.002, decode_context_s: 0, prefill_token_s: 0.001, load_s: 0.5,
  publish_s: 0.3, train_token_s: 0.02, train_step_s: 0.4}
"""
QUICK = ("--batch", "4x4", "--lengths", "mean=40,p95=110,max=150,prompt=5", "--staleness", "0,2")


# ---- lengths


@pytest.mark.parametrize(
    ("text", "mean", "p50", "p95"),
    [
        ("mean=9400,p95=24000,max=27648", 9400, None, 24000),
        ("p50=2000,p95=9000,max=16384", None, 2000, 9000),
        ("mean=500,p50=400,max=4000", 500, 400, None),
    ],
)
def test_a_distribution_has_the_numbers_that_it_was_asked_for(
    text: str, mean: float | None, p50: float | None, p95: float | None
) -> None:
    lengths = parse_lengths(text)
    drawn = lengths.draw(np.random.default_rng(0), 200_000)
    assert drawn.max() <= lengths.longest
    for wanted, told, is_ in (
        (mean, lengths.mean, drawn.mean()),
        (p50, lengths.quantile(0.5), np.quantile(drawn, 0.5)),
        (p95, lengths.quantile(0.95), np.quantile(drawn, 0.95)),
    ):
        if wanted is not None:
            assert told == pytest.approx(wanted, rel=0.01)
            assert is_ == pytest.approx(wanted, rel=0.02)


def test_real_lengths_are_drawn_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("10\n20\n30\n")
    lengths = parse_lengths(str(path))
    assert set(lengths.draw(np.random.default_rng(0), 100).tolist()) == {10, 20, 30}
    assert lengths.mean == 20
    assert lengths.scaled(2.0).mean == pytest.approx(80 / 3)  # cut at 30, where the longest was


def test_the_context_of_a_running_answer_is_that_of_a_random_moment() -> None:
    """Long answers are met more often than short ones, and half done."""
    lengths = observed([10, 30], prompt=5)
    assert lengths.running_context == pytest.approx(5 + (10 * 5 + 30 * 15) / 40)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mean=9400", "give max and two of"),
        ("mean=9400,p95=30000,max=27648", "below max"),
        ("mean=100,p95=90,max=1000", "No distribution"),
        ("p50=900,p95=100,max=1000", "No distribution"),
        ("men=3,p95=90,max=1000", "there is no 'men'"),
        ("mean=x,p95=90,max=1000", "not name=number"),
        ("fixed=3,max=4", "fixed stands alone"),
        ("fixed=-3", "between 1 and"),
        ("no-such-file", "no file no-such-file"),
    ],
)
def test_lengths_that_cannot_be_are_told(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_lengths(text)


# ---- speeds


def test_speeds_follow_from_data_sheets_as_the_docs_say() -> None:
    hardware = Hardware.model_validate(
        {
            "device": {"memory_gb": 10, "bandwidth_gb_s": 1000, "tflops": 100},
            "model": {"parameters": 1e9, "layers": 10, "hidden": 1000, "kv_heads": 2, "head_size": 50, "bytes": 2},
            "efficiency": {
                "bandwidth": 0.5, "prefill": 0.5, "train": 0.4, "memory": 1, "step_overhead_s": 0.003,
                "transfer_gb_s": 2, "update_s": 1,
            },
        }
    )  # fmt: skip
    speeds = hardware.speeds_for(parse_lengths("fixed=1000,prompt=500"))
    kv_bytes, context = 2 * 10 * 2 * 50 * 2, 1000
    assert speeds.slots == min(512, int(8e9 / (kv_bytes * context)))
    assert speeds.decode_base_s == pytest.approx(0.003 + 2e9 / 0.5e12)
    assert speeds.decode_row_s == pytest.approx(2e9 / 50e12)
    assert speeds.decode_context_s == pytest.approx(kv_bytes / 0.5e12)
    assert speeds.prefill_token_s == pytest.approx((2e9 + 4 * 10 * 1000 * 500) / 50e12)
    assert speeds.train_token_s == pytest.approx(4 * (2e9 + 4 * 10 * 1000 * 1000) / 40e12)
    assert speeds.load_s == pytest.approx(1 + 1)
    assert speeds.publish_s == pytest.approx(1)


def test_every_preset_can_be_planned_with() -> None:
    lengths = parse_lengths("mean=9400,p95=24000,max=27648")
    for name in presets():
        assert load_hardware(name).speeds_for(lengths).slots >= 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("speeds: {slot: 3}", "there is no slot"),
        ("speeds: {slots: 3}", "no usable decode_base_s"),
        ("device: {memory_gb: 1, bandwidth_gb_s: 1, tflops: 1}", "belong together"),
        ("gpus: 3", "gpus: Extra inputs"),
        ("{", "no YAML"),
    ],
)
def test_a_hardware_file_that_says_too_little_is_told(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        load_hardware(str(path)).speeds_for(parse_lengths("fixed=10"))


def test_a_model_that_does_not_fit_is_told() -> None:
    hardware = load_hardware("h800-32b")
    assert hardware.device is not None
    small = hardware.device.model_copy(update={"memory_gb": 40})
    big = hardware.model_copy(update={"engine_devices": 1, "device": small})
    with pytest.raises(UserError, match="leave no room"):
        big.speeds_for(parse_lengths("fixed=10000"))


def test_a_line_is_found_and_never_bends_below_zero() -> None:
    x = np.array([1.0, 2.0, 4.0])
    assert line(x, 3 + 2 * x, np.ones(3)) == pytest.approx((3, 2))
    assert line(x, 3 - 0.5 * x, np.ones(3))[1] == 0
    assert line(x, 2 * x - 1, np.ones(3)) == pytest.approx((0, np.mean(2 * x - 1) / np.mean(x)), abs=1e-8)


def test_speeds_measured_in_a_log_are_those_of_the_engines_that_wrote_it() -> None:
    """`--from` on a run whose speeds are known: the production actors in virtual time, with model engines."""
    speeds = Speeds(
        slots=16, decode_base_s=0.05, decode_row_s=0.004, decode_context_s=0, prefill_token_s=0, load_s=0,
        publish_s=0.3, train_token_s=0.004, train_step_s=0.4,
    )  # fmt: skip
    config = ControllerConfig(batch_groups=6, group_size=4, max_staleness=1)
    hub = MemoryHub()
    lengths = parse_lengths("mean=40,p95=110,max=150,prompt=5")
    run_twin(speeds, Workload(lengths, config, on_update="keep"), engines=2, train_devices=1, steps=20, hub=hub)
    measured = asyncio.run(measure(RunLog(MemoryBus("twin", hub), Path(), "")))
    found = measured.hardware.speeds_for(measured.lengths)
    for rows in (4, 16):
        expected = speeds.decode_base_s + rows * speeds.decode_row_s
        assert found.decode_base_s + rows * found.decode_row_s == pytest.approx(expected, rel=0.12)
    assert found.train_s(1000, 1) == pytest.approx(speeds.train_s(1000, 1), rel=0.05)
    assert found.publish_s == pytest.approx(0.3)
    assert measured.lengths.prompt == 5
    assert measured.lengths.mean == pytest.approx(40, rel=0.15)


# ---- splits and plans


def test_splits_are_whole_engines() -> None:
    assert splits_of(8, 1) == [(n, 8 - n) for n in range(1, 8)]
    assert splits_of(64, 4)[0] == (4, 60)
    assert all(rollout % 4 == 0 and rollout + train == 72 for rollout, train in splits_of(72, 4))
    assert splits_of(1, 1) == []


@pytest.mark.parametrize(
    ("split", "says"), [((0, 8), "both sides"), ((6, 3), "makes 9 devices"), ((5, 3), "an engine takes 2")]
)
def test_a_split_that_cannot_be_is_told(split: tuple[int, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_split(split, 8, 2)


@pytest.fixture(scope="module")
def plan() -> Plan:
    speeds = Speeds(
        slots=8, decode_base_s=0.05, decode_row_s=0.002, decode_context_s=0, prefill_token_s=0.001, load_s=0.5,
        publish_s=0.3, train_token_s=0.02, train_step_s=0.4,
    )  # fmt: skip
    lengths = parse_lengths("mean=40,p95=110,max=150,prompt=5")
    load = Workload(lengths, ControllerConfig(batch_groups=4, group_size=4))
    return make_plan(speeds, load, devices=8, bounds=(0, 1, 4), reference=4)


def test_the_best_split_comes_first_and_its_bounds_in_order(plan: Plan) -> None:
    rates = [outcome.tokens_per_s for outcome in plan.splits]
    assert rates == sorted(rates, reverse=True)
    assert [outcome.max_staleness for outcome in plan.bounds] == [0, 1, 4]
    assert {(outcome.rollout, outcome.train) for outcome in plan.bounds} == {(plan.best.rollout, plan.best.train)}
    assert plan.advised.tokens_per_s >= 0.95 * max(outcome.tokens_per_s for outcome in plan.bounds)


def test_where_the_bound_masks_tokens_it_is_told_what_waiting_gives(plan: Plan) -> None:
    speeds = plan.speeds.model_copy(update={"train_token_s": 0.004})
    found = make_plan(speeds, plan.workload, devices=3, bounds=(1,), reference=1, split=(2, 1))
    assert found.best.too_old > 0.02
    assert found.waiting is not None
    assert found.waiting.too_old == 0
    assert any("controller.on_stale=wait keeps them" in line for line in advice(found))


def test_a_plan_can_be_read(plan: Plan) -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render(plan, 140))
    text = console.export_text()
    assert "8 devices, batches of 4 groups of 4" in text
    assert "synchronous, all 8 generate, then train" in text
    assert advice(plan)[0].startswith(f"Use {plan.advised.rollout}:{plan.advised.train} with η = ")
    assert advice(plan)[0] in " ".join(text.split())


@pytest.mark.parametrize("width", [80, 110])
def test_no_number_is_cut_off_on_a_narrow_terminal(plan: Plan, width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(plan, width))
    assert "…" not in console.export_text()


def test_numbers_are_told_with_three_digits() -> None:
    assert [quantity(value) for value in (41.2, 999.6, 3210, 63_300, 1_204_000)] == [
        "41",
        "1.00k",
        "3.21k",
        "63.3k",
        "1.20M",
    ]
    assert [duration(value) for value in (0.2171, 21.71, 217.1, 700)] == ["0.22 s", "21.7 s", "217 s", "11.7 min"]


# ---- the command


def test_the_command_answers_in_json_and_draws(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(SPEEDS)
    image = tmp_path / "plan.png"
    arguments = ["plan", "--devices", "3", "--hardware", str(mine), *QUICK, "--json", "--plot", str(image)]
    answer = CliRunner().invoke(cli.app, arguments)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert [outcome["max_staleness"] for outcome in found["bounds"]] == [0, 2]
    assert found["reference_staleness"] == 2
    assert sum(found["advice"]["split"]) == 3
    assert image.read_bytes().startswith(b"\x89PNG")


def test_a_recipe_says_how_batches_are_formed_and_how_many_slots_there_are() -> None:
    recipe = Path(cli.__file__).parent / "recipes" / "running_total.yaml"
    arguments = ["plan", str(recipe), "rollout.slots=48", "controller.max_staleness=1", "--devices", "2"]
    arguments += ["--hardware", "cpu-running-total", "--lengths", "fixed=9", "--split", "1:1", "--staleness", "1,2"]
    answer = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["speeds"]["slots"] == 48
    assert found["reference_staleness"] == 1
    tokens = found["bounds"][0]["tokens_per_s"] * found["bounds"][0]["step_s"]
    assert tokens == pytest.approx(16 * 8 * 9, rel=0.01)


def test_answers_that_grow_are_planned_for_twice(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(SPEEDS)
    arguments = ["plan", "--devices", "2", "--hardware", str(mine), *QUICK, "--grow", "1.3"]
    answer = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "150"})
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.count("Use 1:1 with") == 2
    assert "1:1 still gives" in answer.stdout


def test_a_preset_can_be_copied_and_planned_with(tmp_path: Path) -> None:
    answer = CliRunner().invoke(cli.app, ["plan", "--show-hardware", "h800-7b"])
    mine = tmp_path / "mine.yaml"
    mine.write_text(answer.stdout)
    assert load_hardware(str(mine)) == load_hardware("h800-7b")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "How long are the answers"),
        (("--lengths", "fixed=10"), "no speeds to plan with"),
        ((*QUICK, "--hardware", "h900"), "no hardware file or preset h900"),
        ((*QUICK, "--hardware", "h800-1.5b", "--devices", "0"), "--devices 0"),
        ((*QUICK, "--hardware", "h800-1.5b", "--devices", "1"), "cannot be split"),
        ((*QUICK, "--hardware", "h800-1.5b", "--split", "60:8"), "makes 68 devices"),
        ((*QUICK, "--hardware", "h800-1.5b", "--split", "60"), "not of the form 48:16"),
        ((*QUICK, "--hardware", "h800-1.5b", "--staleness", "-1"), "η lies between"),
        ((*QUICK, "--hardware", "h800-1.5b", "--batch", "0x16"), "--batch 0x16"),
        ((*QUICK, "--hardware", "h800-1.5b", "--grow", "0"), "--grow 0"),
        ((*QUICK, "--from", "no-such-run"), "no-such-run"),
    ],
)
def test_nonsense_is_told_and_not_planned(arguments: tuple[str, ...], says: str) -> None:
    answer = CliRunner().invoke(cli.app, ["plan", *arguments])
    assert isinstance(answer.exception, UserError), answer.output
    assert says in answer.exception.message
    assert answer.exception.remedy
