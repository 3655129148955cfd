"""What a person may ask of a trainer with ranks, before anything is started."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ops.host import ProcessSpec
from ops.launch import Where, _exported, _with_ranks
from ops.recipe import Recipe, load_recipe
from ops.trainer_job import rank_spec, read_job, write_job
from ops.workers import specs
from schemas import UserError
from tests.e2e.harness import RECIPE


def recipe(*overrides: str) -> Recipe:
    return load_recipe(RECIPE, overrides)


def test_a_run_with_no_ranks_leaves_its_trainer_to_the_person(tmp_path: Path) -> None:
    """`rollstream up trainer`, or a launcher of one's own."""
    where = Where(tmp_path, "run", "nats://localhost")
    roles = [role for spec in specs(recipe("trainer.ranks=0"), where) for role, _ in spec.actors]
    assert "trainer" not in roles
    assert "rollout" in roles


@pytest.mark.parametrize(("asked", "in_recipe", "found"), [(2, 0, 2), (None, 4, 4), (None, 0, 1), (1, 4, 1)])
def test_the_command_line_says_how_many_ranks(asked: int | None, in_recipe: int, found: int) -> None:
    text = _with_ranks(recipe(f"trainer.ranks={in_recipe}").to_yaml(), "trainer", 1, asked)
    assert Recipe.from_yaml(text).trainer.ranks == found


@pytest.mark.parametrize(
    ("role", "count", "ranks", "says"),
    [("rollout", 1, 2, "--ranks is for a trainer"), ("trainer", 2, None, "one trainer")],
)
def test_ranks_and_counts_are_not_confused(role: str, count: int, ranks: int | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        _with_ranks(recipe().to_yaml(), role, count, ranks)  # type: ignore[arg-type]


def test_the_ranks_of_a_job_read_what_it_wrote(tmp_path: Path) -> None:
    """The file holds the server's password, so nobody else may read it."""
    spec = ProcessSpec((("trainer", "trainer"),), "run", "nats://user:password@host", tmp_path, recipe().to_yaml())
    file = write_job(spec)
    assert file.stat().st_mode & 0o077 == 0
    assert read_job(file) == spec
    assert [rank_spec(spec, rank).name for rank in (0, 1)] == ["trainer", "trainer-rank1"]


async def test_the_end_of_a_run_waits_for_the_model_of_somebody_elses_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is evaluated next. One from before the run was resumed is not the one that is waited for."""
    monkeypatch.setattr("ops.launch.EXPORT_S", 0.1)
    monkeypatch.setattr("ops.launch.SHOW_EVERY_S", 0.01)
    model, began_s = tmp_path / "model", time.time()
    with pytest.raises(UserError, match="has not written"):
        await _exported(model, began_s)
    model.mkdir()
    os.utime(model, (began_s - 100, began_s - 100))
    with pytest.raises(UserError, match="has not written"):
        await _exported(model, began_s)
    os.utime(model, (began_s + 1, began_s + 1))
    await _exported(model, began_s)
