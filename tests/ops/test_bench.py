"""Numbers that are quoted must be those of the runs, and the commands must not rot between two releases."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ops import slow_reward
from ops.bench import QUICK, SLOW, Timing, bench_async, laboratory, measure, report, steady
from ops.bench_cost import (
    Cost,
    Reading,
    bench_cost,
    cost_of_marks,
    cost_of_readings,
    read_cpu,
)
from ops.bench_cost import report as cost_report
from ops.bench_loops import Marks
from ops.summary import Summary
from recipes.running_total import make_model, reward
from schemas import UserError


def summary(**series: list[float | None]) -> Summary:
    """A run's summary of which only the series matter."""
    nothing = {field.name: 0 for field in dataclasses.fields(Summary)}
    return Summary(**{**nothing, "series": series})  # type: ignore[arg-type]


def test_a_run_is_timed_over_its_second_half() -> None:
    """Hand-computed: three slow steps while the pipeline fills must not enter, nor the start before the first."""
    run = summary(
        seconds=[20.0, 30.0, 40.0, 41.0, 42.5, 44.0],
        staleness_mean=[0.0, 1.0, 2.0, 3.0, 3.0, 4.5],
        response_length=[5.0, 5.0, 5.0, 10.0, 20.0, 30.0],
        reward=[0.0, 0.5, 0.6, None, 0.8, 0.9],
    )
    timing = steady(run, SLOW, 4)
    assert timing.step_s == pytest.approx((44.0 - 40.0) / 3)
    assert timing.staleness == pytest.approx(3.5)
    assert timing.length == pytest.approx(20.0)
    assert timing.reward == pytest.approx((0.0 + 0.5 + 0.6 + 0.8 + 0.9) / 5)


def test_the_table_tells_each_speed_up() -> None:
    """The quotient of the means over all runs of a kind; two runs are both shown, so that noise can be seen."""
    timings = [
        Timing(kind, bound, step_s, float(bound), 20.0, 0.9)
        for kind, bound, step_s in (
            (QUICK, 0, 0.5), (QUICK, 4, 0.3), (SLOW, 4, 0.6), (SLOW, 0, 2.4), (QUICK, 4, 0.2), (QUICK, 0, 0.4),
        )
    ]  # fmt: skip
    rows = [line for line in report(timings, 40, 30, "a machine").splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "| no time | 0 | 0.450 (0.500 and 0.400) |  | 0.00 | 20.0 | 0.900 |",
        "| no time | 4 | 0.250 (0.300 and 0.200) | **1.80** | 4.00 | 20.0 | 0.900 |",
        "| 0.2 to 2 s | 0 | 2.400 |  | 0.00 | 20.0 | 0.900 |",
        "| 0.2 to 2 s | 4 | 0.600 | **4.00** | 4.00 | 20.0 | 0.900 |",
    ]


def test_the_slow_reward_is_the_reward_after_a_time_that_the_sample_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both staleness bounds must wait equally long for equal samples, or the comparison would be of luck."""
    waits = [slow_reward.seconds(f"{group}-{index}") for group in range(64) for index in range(8)]
    assert len(set(waits)) == len(waits)
    assert 0.2 <= min(waits) < 0.25
    assert 1.95 < max(waits) <= 2.0
    assert sum(waits) / len(waits) == pytest.approx(1.1, abs=0.05)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for response in ("# 7", "# 8"):
        asked = (response, {"answer": "7"}, "stop")
        assert slow_reward.reward(*asked, sample_id="3-1") == reward(*asked)
    assert slept == [slow_reward.seconds("3-1")] * 2


def test_a_loop_costs_what_it_used_between_its_first_and_last_batch() -> None:
    """Hand-computed: loading torch is start-up, and so is the first batch."""
    marks = Marks([6.0, 6.5, 8.0], [100.0, 101.0, 104.0], [0.2, 0.4, 0.6], [50, 100, 300])
    cost = cost_of_marks("plain loop", marks)
    assert (cost.batch_cpu_s, cost.batch_s, cost.batch_tokens) == (1.0, 2.0, 200.0)
    assert (cost.start_cpu_s, cost.reward) == (6.0, pytest.approx(0.4))


def test_the_system_costs_what_all_its_processes_used() -> None:
    """A process that starts in mid-run counts from zero, and the parts add up to the whole."""
    first = Reading(10.0, {"trainer": 4.0, "nats-server": 1.0})
    last = Reading(16.0, {"trainer": 7.0, "nats-server": 2.0, "rollout-0": 6.0})
    cost = cost_of_readings("Rollstream", first, last, steps=5, tokens=90.0, reward=0.5)
    assert (cost.batch_cpu_s, cost.batch_s, cost.start_cpu_s) == (2.5, 1.5, 5.0)
    assert cost.parts == {"rollout-0": (1.5, 0.0), "trainer": (0.75, 4.0), "nats-server": (0.25, 1.0)}
    assert list(cost.parts) == ["rollout-0", "trainer", "nats-server"]
    plain = Cost("plain loop", 1.25, 1.0, 100.0, 3.0, 0.5)
    lines = cost_report([plain, cost], 5, 128, "a machine").splitlines()
    assert "| Rollstream | **2.500** | 2.00 | 1.500 | 90 | 5.0 | 0.500 |" in lines
    assert "| trainer | 0.750 | 30% | 4.0 |" in lines


def test_cpu_seconds_are_read_from_the_processes_themselves(tmp_path: Path) -> None:
    """Reward functions run in grandchildren that tell nobody what they use; they are most of what is easily missed."""
    burn = "import time; begin = time.process_time()\nwhile time.process_time() - begin < {}: pass\n"
    wait = "print('ready', flush=True); time.sleep(60)"
    program = (
        "import subprocess, sys, time\n"
        f"reward = subprocess.Popen([sys.executable, '-c', {burn.format(0.3) + wait!r}], stdout=subprocess.PIPE)\n"
        "reward.stdout.readline()\n"
        f"subprocess.run([sys.executable, '-c', {burn.format(0.4)!r}])\n"
        f"{wait}\n"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            (controller,) = psutil.Process(process.pid).children()
            (tmp_path / "processes.json").write_text(json.dumps({"controller+reward-0": controller.pid}))
            reading = read_cpu(process.pid, tmp_path)
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
    assert set(reading.cpu_s) == {"launcher", "controller+reward-0", "reward functions"}
    assert 0.25 < reading.cpu_s["reward functions"] < 0.8
    assert reading.cpu_s["controller+reward-0"] > 0.35, "the child that ended counts for its parent"
    assert reading.total_s == pytest.approx(sum(reading.cpu_s.values()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model does for a start."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, seed=0)
    return folder


@pytest.mark.e2e
def test_the_cost_of_the_whole_system_is_measured_beside_the_plain_loop(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command as a person gives it, but short, and without the peer, which needs packages of its own."""
    monkeypatch.setattr("ops.bench_cost.find_spec", lambda name: None)
    out = tmp_path / "docs" / "cost.md"
    assert asyncio.run(bench_cost(3, model, out, tmp_path / "bench")) == 0
    text = out.read_text()
    assert text in capsys.readouterr().out
    for name in ("plain loop", "Rollstream, all processes", "trainer", "rollout-0", "nats-server", "reward functions"):
        assert f"| {name} |" in text
    assert "TRL" not in text


@pytest.mark.e2e
def test_a_run_is_measured_in_processes_of_its_own(tmp_path: Path, model: Path) -> None:
    """One short run stands for the six that the command makes, which take minutes."""

    async def measured() -> Timing:
        async with laboratory(model, tmp_path / "bench") as lab:
            return await measure(lab, "run-0", QUICK, bound=0, steps=4)

    timing = asyncio.run(measured())
    assert (timing.reward_kind, timing.bound, timing.staleness) == (QUICK, 0, 0.0)
    assert 0.0 < timing.step_s < 60.0
    assert 1.0 <= timing.length <= 80.0


def test_a_bench_that_cannot_begin_says_why(tmp_path: Path) -> None:
    """It would otherwise look like a slow one."""
    with pytest.raises(UserError, match="exists"):
        asyncio.run(bench_async(folder=tmp_path))
    with pytest.raises(UserError, match="no model folder"):
        asyncio.run(bench_async(warm=tmp_path / "none", folder=tmp_path / "bench"))
