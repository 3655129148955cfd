"""The numbers at the end are quoted by people: they must be those of the run."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ops.summary import Summary, plot, print_summary, summarise
from ops.view import RunView
from schemas import Dropped, StepDone
from tests.ops.sound_log import evaluation

START_S = 1000.0
STEPS = 12


def finished() -> RunView:
    """12 steps, one every 2 s, 100 tokens each; 150 generated and 3 CPU seconds a step."""
    view = RunView("a-run", STEPS, max_staleness=4, batch_samples=8, started_s=START_S)
    view.evaluated(evaluation(0, 0.25))
    for step in range(STEPS):
        now_s = START_S + 2 * step + 2
        process = {"process": "host:1", "cpu_s": 5.0 + 3.0 * step}
        rollout = {"actor": "rollout-0", "role": "rollout", "tokens_generated": 150 * step, "idle_share": 0.5}
        view.beat(rollout | process | {"idle_why": "prompts"}, now_s)
        metrics = {"reward_mean": step / STEPS, "entropy": 1.0}
        view.step_done(StepDone(step=step, version=step + 1, metrics=metrics, staleness=np.array([75, 0, 25])), now_s)
    view.evaluated(evaluation(STEPS, 1.0))
    for index in range(1200):
        view.drop(Dropped(group_id=3, index=index, reason="zero_variance"), START_S + 20)
    view.drop(Dropped(group_id=4, index=0, reason="error", detail="episode: KeyError: 'a'\n[task.py, line 7]"), START_S)
    view.drop(Dropped(group_id=5, index=1, reason="run_ended"), START_S + 29)
    return view


def test_a_run_shorter_than_a_beat_has_no_rate_of_generation_rather_than_none_at_all() -> None:
    """Workers tell their counts once a second; a few quick steps would be said to have generated 0 a second."""
    view = RunView("short", 2, 4, 128, started_s=START_S)
    for step in range(2):
        done = StepDone(step=step, version=step + 1, metrics={"reward_mean": 0.5}, staleness=np.array([75]))
        view.step_done(done, START_S + 0.1 * step)
    assert summarise(view, START_S + 1).generated_per_s is None


def test_the_summary_tells_rates_costs_and_staleness_of_the_run() -> None:
    """Hand-computed: 11 steps of 2 s lie between the first and the last."""
    summary = summarise(finished(), START_S + 30)
    assert summary.steps == STEPS
    assert summary.seconds == pytest.approx(30)
    assert summary.generated_per_s == pytest.approx(75)
    assert summary.trained_per_s == pytest.approx(50)
    assert summary.cpu_per_step_s == pytest.approx(3.0)
    assert summary.cpu_total_s == pytest.approx(38.0)
    assert summary.staleness == [900, 0, 300]
    assert summary.staleness_mean == pytest.approx(0.5)
    assert summary.reward_first == pytest.approx(sum(range(5)) / 5 / STEPS)
    assert summary.reward_last == pytest.approx(sum(range(7, 12)) / 5 / STEPS)
    assert [(a.actor, a.idle_share, a.waits_for) for a in summary.actors] == [("rollout-0", 0.5, "prompts")]


def test_a_resumed_run_counts_rates_and_costs_from_its_resume_on() -> None:
    """Steps of the night before come from the log with their own times; this start did not pay for them."""
    view = RunView("a-run", 4, 4, 8, START_S)
    for step, at_s in enumerate((START_S - 50_000, START_S - 49_990, START_S + 1, START_S + 3)):
        view.step_done(StepDone(step=step, version=step + 1, metrics={}, staleness=np.array([10])), at_s)
    summary = summarise(view, START_S + 4)
    assert summary.trained_per_s == pytest.approx(5.0)
    assert summary.tokens_trained == 40
    assert summary.series["trained_per_s"][:3] == [None, None, None]


def test_a_summary_survives_its_way_through_json() -> None:
    """`status` tells a run that has ended by it."""
    summary = summarise(finished(), START_S + 30)
    assert Summary.from_json(summary.to_json()) == summary


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"run": "x", "actors": [], "evaluations": []}'])
def test_other_json_is_no_summary(text: str) -> None:
    """A file of another version must be told apart, not crash the command."""
    with pytest.raises(ValueError):
        Summary.from_json(text)


def test_the_printed_summary_names_what_a_person_looks_for() -> None:
    """Reward, held-out score, staleness, throughput, cost, and who was idle."""
    console = Console(width=120, file=io.StringIO(), record=True)
    print_summary(summarise(finished(), START_S + 30), console)
    text = console.export_text()
    for part in (
        "12 of 12 steps",
        "0.250 (version 0) → 1.000 (version 12)",
        "12, held-out reward 1.000",
        "75 tokens/s generated, 50 trained",
        "mean 0.50, max 2",
        "1,201 samples (1,200 zero_variance, 1 error)",
        "sample 4-0: error: episode: KeyError: 'a' [task.py, line 7]",
    ):
        assert part in text
    for part in ("3.00 s a batch of 8 samples", "2 versions old", "25.0%", "rollout-0", "prompts"):
        assert part in text


@pytest.mark.parametrize(
    "view", [finished(), RunView("empty", 5, 0, 8, START_S)], ids=["finished", "stopped before its first step"]
)
def test_the_plot_is_a_picture_of_some_size(view: RunView, tmp_path: Path) -> None:
    """Also of a run that was stopped before anything was trained."""
    from PIL import Image

    path = tmp_path / "summary.png"
    plot(summarise(view, START_S + 30), path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width > 1000
        assert image.height > 700
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24) or ()) > 50  # something is drawn
