"""The study's sentences are computed: a wrong pairing, sign or delay would tell a story that the runs do not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ops import bench_staleness
from ops.bench_staleness import Cell, Laboratory, numbers
from ops.bench_staleness_report import Estimate, Study, over_the_run, plot, report
from ops.bench_staleness_run import METRICS, Course, train
from ops.recipe import load_recipe
from recipes.running_total import make_model
from schemas import UserError

RECIPE = Path(bench_staleness.__file__).parent.parent / "recipes" / "running_total.yaml"


def course(rewards: list[float], held_out: float, staleness: float = 0.0) -> Course:
    names = ("staleness", *METRICS)
    return Course(
        {"reward": rewards} | {name: [staleness] * len(rewards) for name in names}, [(len(rewards), held_out)]
    )


def study() -> Study:
    """Naive loses half of its reward at η = 2 in all three seeds; decoupled only comes two steps later."""
    runs = {}
    for seed in range(3):
        fresh = [0.2, 0.4, 0.6, 0.8 + 0.01 * seed]
        late = [0.2, 0.2, 0.2, 0.4]
        for loss in ("naive", "decoupled"):
            runs[0, loss, seed] = course(fresh, 0.9)
            runs[2, loss, seed] = course(late if loss == "decoupled" else [r / 2 for r in late], 0.5 + 0.1 * seed, 2.0)
    return Study(runs)


def test_an_interval_is_that_of_students_t() -> None:
    """Hand-computed: mean 2, standard deviation 1, half width 4.303/√3; one seed allows nothing to be said."""
    estimate = Estimate([1.0, 2.0, 3.0])
    assert (estimate.mean, estimate.spread) == (2.0, 1.0)
    assert estimate.half_width == pytest.approx(2.4843, abs=1e-3)
    assert estimate.sign == 0
    assert [Estimate(values).sign for values in ([0.9, 1.0, 1.1], [-0.9, -1.0, -1.1], [5.0])] == [1, -1, 0]


def test_differences_are_paired_by_seed() -> None:
    """A seed's warm start moves both runs of a pair: unpaired, it would drown what the loss does."""
    difference = Estimate([1.1, 5.1, 9.1]) - Estimate([1.0, 5.0, 9.0])
    assert difference.mean == pytest.approx(0.1)
    assert difference.sign == 1


def test_delayed_rewards_are_those_without_staleness_some_steps_later() -> None:
    """The first ones are of the warm start, as there."""
    (first, *_) = study().delayed(2)
    assert first.series["reward"] == [0.2, 0.2, 0.2, 0.4]


def test_the_page_tells_what_the_runs_allow() -> None:
    recipe = load_recipe(RECIPE, ("steps=4",))
    page = report(study(), Study({}), recipe, "a machine", plotted=False)
    assert "| 2 | *delayed* | | 0.250 ± 0.000 | 0.250 ± 0.000 | | |" in page
    assert "| 2 | naive | 2.00 | 0.125 ± 0.000 | 0.125 ± 0.000 | – | 0.600 ± 0.100 |" in page
    assert "| 2 | **+0.125 ± 0.000** | **+0.125 ± 0.000** | – | +0.000 ± 0.000 |" in page
    assert "Reward over the run: decoupled is better at η = 2." in page
    assert "Reward held-out, at the end: the seeds do not tell them apart at η = 2." in page
    assert "Naive − delayed, over the run: **-0.125 ± 0.000** at η = 2." in page
    assert "Decoupled − delayed, over the run: +0.000 ± 0.000 at η = 2." in page
    assert "filled to the bound" not in page
    assert "## The whole system, filled to the bound" in report(study(), study(), recipe, "", plotted=True)


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    plot(study(), tmp_path / "img" / "plot.png")
    assert (tmp_path / "img" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_bounds_are_read_in_any_order_and_nonsense_is_refused() -> None:
    assert numbers("8,0,0,2", "--eta") == [0, 2, 8]
    assert numbers("none", "--live") == []
    for text in ("", "1,x", "-1"):
        with pytest.raises(UserError, match="--eta"):
            numbers(text, "--eta")


def test_every_batch_is_exactly_so_old_once_there_are_versions_so_old(tmp_path: Path) -> None:
    """The controlled variable of the experiment; and with staleness the importance weights leave 1."""
    make_model(tmp_path / "model", seed=0)
    small = ("controller.batch_groups=2", "controller.group_size=4", "rollout.max_new_tokens=6", "evaluation.count=4")
    recipe = load_recipe(RECIPE, (*small, "steps=5", "sft=null"))
    done = train(recipe, tmp_path / "model", 2)
    assert done.series["staleness"] == [0.0, 1.0, 2.0, 2.0, 2.0]
    assert [step for step, _ in done.held_out] == [0, 5]
    assert all(len(values) == 5 for values in done.series.values())
    done.write(tmp_path / "course.json")
    assert Course.read(tmp_path / "course.json") == done


def test_a_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of computing are not to be lost; and a folder of other settings must not be mixed in."""
    made: list[str] = []

    async def run(self: Laboratory, cell: Cell) -> Course:
        if str(cell) == "exact-1-naive-0" and len(made) < 3:
            raise UserError("interrupted", "go on")
        made.append(str(cell))
        course([0.1, 0.2], 0.3).write(self.result(cell))
        return Course.read(self.result(cell))

    async def warm_start(self: Laboratory, seed: int) -> None:
        return None

    monkeypatch.setattr(Laboratory, "run", run)
    monkeypatch.setattr(Laboratory, "warm_start", warm_start)
    settings = {"bounds": [0, 1], "live": [], "seeds": 1, "jobs": 1, "folder": tmp_path / "study", "out": None}
    with pytest.raises(UserError, match="interrupted"):
        asyncio.run(bench_staleness.bench_staleness(RECIPE, (), steps=2, **settings))
    made += ["", ""]
    assert asyncio.run(bench_staleness.bench_staleness(RECIPE, (), steps=2, **settings)) == 0
    names = [name for name in made if name]
    assert sorted(names) == sorted(set(names)), "a run that was done is not made again"
    assert len(names) == 4
    with pytest.raises(UserError, match="not the folder of this study"):
        asyncio.run(bench_staleness.bench_staleness(RECIPE, (), steps=3, **settings))
    assert json.loads((tmp_path / "study" / "study.json").read_text())


def test_the_mean_over_the_run_is_of_batches() -> None:
    assert over_the_run(course([0.0, 1.0], 0.0)) == 0.5
