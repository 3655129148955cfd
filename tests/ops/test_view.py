"""What a person sees must be what happened: the fold, the screen, and the lines for a pipe."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

from ops.chart import bar, line_chart
from ops.screen import PlainScreen, draw
from ops.view import RunView, mean_staleness, running_mean
from schemas import Batch, Dropped, StepDone
from tests.ops.sound_log import evaluation

START_S = 1000.0


def view_of(steps: int = 10) -> RunView:
    return RunView("a-run", steps, max_staleness=4, batch_samples=2, started_s=START_S)


def batch(step: int, rewards: list[float], **seen: float) -> Batch:
    n = len(rewards)
    return Batch(
        step=step,
        max_staleness=4,
        group_ids=np.zeros(n, int),
        indices=np.arange(n),
        rollout_seqs=np.arange(1, n + 1),
        rewards=np.array(rewards),
        next_group=1,
        seen=seen,
    )


def step_done(step: int, staleness: tuple[int, ...] = (60, 40)) -> StepDone:
    metrics = {"reward_mean": 0.25, "grad_norm": 0.5, "entropy": 1.5, "clip_fraction": 0.01}
    return StepDone(step=step, version=step + 1, metrics=metrics, staleness=np.array(staleness))


def rollout_beat(tokens: int, process: str = "host:1", actor: str = "rollout-0", **more: object) -> dict[str, object]:
    return {"actor": actor, "role": "rollout", "process": process, "tokens_generated": tokens, "cpu_s": 1.0, **more}


def text_of(view: RunView, now_s: float, width: int = 120, height: int = 50) -> str:
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(draw(view, now_s, width, height, ["rollout-0 was killed"]))
    return console.export_text()


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_reward_of_a_step_is_that_of_all_samples_that_ended_whichever_message_comes_first(
    batch_first: bool,
) -> None:
    """A filter keeps only groups with mixed results; their mean would hide that the model learns."""
    view = view_of()
    messages = [
        lambda: view.batch(batch(0, [0.5, 0.5], samples=8, reward=0.9)),
        lambda: view.step_done(step_done(0), 1001),
    ]
    for tell in messages if batch_first else reversed(messages):
        tell()
    assert view.last is not None
    assert view.last.reward == pytest.approx(0.9)


def test_a_batch_without_statistics_tells_the_mean_of_its_rewards() -> None:
    """`seen` is a later addition to the message; a recorded log may lack it."""
    view = view_of()
    view.batch(batch(0, [0.0, 1.0]))
    view.step_done(step_done(0), START_S + 1)
    assert view.series[0].reward == pytest.approx(0.5)


def test_a_step_that_is_reported_again_counts_once() -> None:
    """A recovered trainer repeats the steps after its checkpoint; tokens must not be counted twice."""
    view = view_of()
    view.step_done(step_done(0), START_S + 1)
    view.step_done(step_done(0), START_S + 9)
    assert view.staleness == [60, 40]
    assert view.series[0].time_s == START_S + 1


def test_of_a_steps_metrics_only_those_that_are_shown_are_kept() -> None:
    """The log has all hundred of each step; a launcher that kept them, too, grew for as long as it ran."""
    view = view_of()
    told = {f"phase_{i}_s": 1.0 for i in range(100)} | {"reward_mean": 0.25, "entropy": 1.5}
    view.step_done(StepDone(step=0, version=1, metrics=told, staleness=np.array([1])), START_S)
    assert dict(view.points[0].metrics) == {"reward_mean": 0.25, "entropy": 1.5}


def test_staleness_adds_up_over_steps_of_different_depth() -> None:
    """Early steps have no old tokens: their histograms are shorter."""
    view = view_of()
    view.step_done(step_done(0, (10,)), START_S)
    view.step_done(step_done(1, (5, 0, 5)), START_S + 1)
    assert view.staleness == [15, 0, 5]
    assert mean_staleness(view.staleness) == pytest.approx(0.5)
    assert view.series[1].staleness_max == 2
    assert view.series[1].staleness_mean == pytest.approx(1.0)


def test_generated_tokens_survive_the_restart_of_a_worker() -> None:
    """A new process counts from zero; what the old one made was made."""
    view = view_of()
    view.beat(rollout_beat(100), START_S)
    view.beat(rollout_beat(300), START_S + 1)
    view.beat(rollout_beat(50, process="host:2"), START_S + 2)
    view.beat(rollout_beat(70, process="host:2"), START_S + 3)
    assert view.generated == 370


def test_the_generation_rate_is_over_all_workers_and_the_last_seconds_only() -> None:
    """Workers come and go: the number must follow within seconds."""
    view = view_of()
    for second in range(31):
        rate = 100 if second <= 10 else 1000
        tokens = 100 * min(second, 10) + rate * max(0, second - 10)
        view.beat(rollout_beat(tokens), START_S + second)
        view.beat(rollout_beat(0, process="host:9", actor="rollout-1"), START_S + second)
    assert view.generated_per_s() == pytest.approx(1000, rel=0.02)


def test_actors_of_one_process_share_its_cpu_seconds_and_a_restart_adds_to_them() -> None:
    """All actors of a process report the process's number; adding those up would double the cost."""
    view = view_of()
    for actor, role, process, cpu_s in (
        ("controller", "controller", "host:1", 3.0),
        ("reward-0", "reward", "host:1", 3.1),
        ("controller", "controller", "host:2", 1.0),  # started again, and killed before its reward worker told itself
        ("trainer", "trainer", "host:3", 7.0),
    ):
        view.beat({"actor": actor, "role": role, "process": process, "cpu_s": cpu_s}, START_S)
    assert view.cpu_by_actor() == {"trainer": 7.0, "controller + reward-0": pytest.approx(4.1)}
    assert view.cpu_s == pytest.approx(11.1)


def test_idle_time_is_weighed_by_the_time_that_a_beat_covers() -> None:
    """A beat that is late covers more time; one after a silence covers a time of which nothing is known."""
    view = view_of()
    beat = {"actor": "trainer", "role": "trainer", "process": "host:1"}
    view.beat({**beat, "idle_share": 1.0, "idle_why": "a batch"}, START_S)
    view.beat({**beat, "idle_share": 1.0, "idle_why": "a batch"}, START_S + 1)
    view.beat({**beat, "idle_share": 0.0, "idle_why": ""}, START_S + 4)
    view.beat({**beat, "idle_share": 0.0, "idle_why": ""}, START_S + 60)
    trainer = view.actors["trainer"]
    assert trainer.idle_share_overall == pytest.approx(0.25)
    assert trainer.idle_why_mostly == "a batch"


@pytest.mark.parametrize(
    "beat",
    [
        {},
        {"actor": 5},
        {"actor": "x"},
        {"actor": "x", "cpu_s": "much", "idle_share": None, "state": 3, "process": []},
        {"actor": "x", "cpu_s": float("nan"), "idle_share": float("inf"), "tokens_generated": "many"},
        {"actor": "x", "role": "a role of the future", "idle_share": 7.0, "idle_why": "y" * 5000},
    ],
)
def test_odd_beats_are_shown_as_far_as_they_make_sense(beat: dict[str, object]) -> None:
    """Beats are plain data from other machines and other versions: they must never end the screen."""
    view = view_of()
    view.beat(beat, START_S)
    view.beat(beat, START_S + 1)
    shown = text_of(view, START_S + 1)
    assert ("x" in view.actors) == (beat.get("actor") == "x")
    assert "a-run" in shown


def test_an_actor_that_is_not_heard_is_silent_and_one_that_said_goodbye_is_not() -> None:
    """A person must see who is missing, and must not be alarmed by who has finished."""
    view = view_of()
    view.beat(rollout_beat(10, running=5), START_S)
    view.beat(rollout_beat(10, actor="rollout-1", process="host:2", state="ended", running=5), START_S)
    assert view.gauge("rollout", "running", START_S + 1) == 5
    assert view.gauge("rollout", "running", START_S + 30) is None
    shown = text_of(view, START_S + 30)
    assert "silent 0:30" in shown
    assert "ended" in shown


def test_the_pace_is_that_of_this_start_only() -> None:
    """After a night between stop and resume, the night must not count as the time of a step."""
    view = view_of(steps=10)
    view.step_done(step_done(0), START_S - 40_000)
    view.step_done(step_done(1), START_S + 1)
    view.step_done(step_done(2), START_S + 3)
    assert view.remaining_s(START_S + 3) == pytest.approx(14.0)
    assert view.trained_per_s() == pytest.approx(50.0)


@pytest.mark.parametrize(("width", "height"), [(40, 20), (80, 24), (120, 50), (200, 60)])
@pytest.mark.parametrize("steps_done", [0, 1, 10])
def test_the_screen_fits_the_terminal_and_shows_every_part(width: int, height: int, steps_done: int) -> None:
    """Drawn at sizes that people have, before the first step, at it, and at the end."""
    view = view_of()
    view.evaluated(evaluation(0, 0.3))
    for step in range(steps_done):
        view.batch(batch(step, [0.1 * step, 0.1 * step]))
        view.step_done(step_done(step), START_S + step)
    view.beat(rollout_beat(10, idle_share=0.25, idle_why="prompts", state="working"), START_S + 10)
    lines = text_of(view, START_S + 10, width, height).splitlines()
    assert max(len(line) for line in lines) <= width
    for part in ("reward", "flow", "actors", "rollout-0 was killed"):
        assert any(part in line for line in lines), part
    if width >= 80:
        assert any(f"step {steps_done} of 10" in line for line in lines)
        assert any("75%" in line and "prompts" in line for line in lines)


def test_a_higher_reward_is_drawn_higher() -> None:
    """The one thing that the chart is looked at for."""
    rows = line_chart([(0, 0.0), (9, 1.0)], [0.0, 1.0], columns=10, width=40, height=4)
    drawn = [row.plain[6:] for row in rows[:4]]
    heights = {column: row for row, line in enumerate(drawn) for column, dot in enumerate(line) if dot != " "}
    assert heights[min(heights)] == 3
    assert heights[max(heights)] == 0


@pytest.mark.parametrize(
    ("share", "drawn"), [(0.0, "    "), (0.5, "██  "), (1.0, "████"), (0.03125, "▏   "), (7.0, "████")]
)
def test_a_bar_is_as_long_as_its_share(share: float, drawn: str) -> None:
    """Eighths of a character, never longer than its place."""
    assert bar(share, 4) == drawn


def test_the_running_mean_starts_with_what_there_is() -> None:
    """The curve must not begin only at the fifth step."""
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_a_pipe_gets_a_header_and_each_step_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Logs of batch jobs are read line by line."""
    view, screen = view_of(), PlainScreen()
    screen.show(view, START_S)
    view.step_done(step_done(0), START_S + 1)
    screen.show(view, START_S + 1)
    screen.show(view, START_S + 2)
    screen.note("trainer was killed")
    view.step_done(step_done(1), START_S + 3)
    screen.show(view, START_S + 3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "step", "1/10", "--", "2/10"]
    assert lines[2].split()[1] == "0.250"


def test_the_last_evaluation_and_the_best_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """On the screen and in a log of lines; of equal rewards the earlier version is the best, as for checkpoints."""
    view, screen = view_of(), PlainScreen()
    screen.show(view, START_S)
    for version, reward in ((0, 0.25), (4, 0.75), (2, 0.75), (6, 0.5)):
        view.evaluated(evaluation(version, reward))
    view.evaluated(evaluation(6, 0.9))  # a second one of a version says nothing
    assert view.evals == [(0, 0.25), (2, 0.75), (4, 0.75), (6, 0.5)]
    assert view.best == evaluation(2, 0.75)
    assert "held out 0.500 (v6), best 0.750 (v2)" in text_of(view, START_S, 120, 40)
    screen.show(view, START_S)
    screen.show(view, START_S)
    lines = [line for line in capsys.readouterr().out.splitlines() if "held-out" in line]
    assert len(lines) == 4
    assert lines[-1] == "-- held-out reward of version 6: 0.500 (greedy, 2 problems); best so far: version 2"


def test_after_a_change_of_the_evaluation_set_only_the_new_one_is_compared() -> None:
    """Rewards on other problems say nothing about which version is better."""
    view = view_of()
    view.evaluated(evaluation(0, 0.9))
    view.evaluated(dataclasses.replace(evaluation(4, 0.5), data="another"))
    assert view.evals == [(4, 0.5)]


def dropped(index: int, reason: str = "error", detail: str = "episode: it is odd") -> Dropped:
    return Dropped(group_id=3, index=index, reason=reason, detail=detail)  # type: ignore[arg-type]


def test_plain_lines_tell_of_failed_samples_at_once_and_then_now_and_then_even_without_a_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run whose samples all failed told nothing at all, for ever."""
    view, screen = view_of(), PlainScreen()

    def told(now_s: float) -> list[str]:
        screen.show(view, now_s)
        return [line for line in capsys.readouterr().out.splitlines() if "failed" in line]

    view.drop(dropped(7), START_S - 100)  # of before a resume
    view.drop(dropped(0, "zero_variance", ""), START_S + 1)
    assert told(START_S + 1) == []
    view.drop(dropped(1), START_S + 1)
    (line,) = told(START_S + 2)
    assert line == "-- 1 sample failed (1 error); the newest, sample 3-1: error: episode: it is odd"
    view.drop(dropped(2, "timeout", "longer than 2 s\n at once " + "x" * 1000), START_S + 3)
    assert told(START_S + 3) == []
    (line,) = told(START_S + 13)
    assert line.startswith(
        "-- 2 samples failed (1 error, 1 timeout); the newest, sample 3-2: timeout: longer than 2 s at"
    )
    assert len(line) < 500
    assert told(START_S + 60) == []


def test_the_live_screen_tells_of_failed_samples_before_the_first_step() -> None:
    view = view_of()
    assert "failed" not in text_of(view, START_S + 1)
    view.drop(dropped(1, detail="[/x] KeyError"), START_S + 1)
    assert "1 sample failed (1 error); the newest, sample 3-1: error: [/x] KeyError" in text_of(view, START_S + 1)
