"""Runs as a user starts them: processes of their own, a real nats-server, a real small model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import RECIPE, Brake, Launched, make_initial


@pytest.fixture(scope="session")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 0, made once for all runs."""
    return make_initial(tmp_path_factory.mktemp("initial"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The recipe of these tests in a folder of the test's own, where it can be broken and mended."""
    return Path(shutil.copytree(RECIPE.parent, tmp_path / "recipe")) / RECIPE.name


@pytest.fixture
def launch(tmp_path: Path, recipe: Path, initial: Path) -> Iterator[Callable[..., Launched]]:
    """`launch("steps=5")` starts a run, `launch(resume=True)` continues it; what is left of it is killed at the end."""
    started: list[Launched] = []
    folder = tmp_path / "run"
    shutil.copytree(initial, folder / "initial")

    def start(*overrides: str, resume: bool = False, options: tuple[str, ...] = ()) -> Launched:
        arguments = ["run", str(recipe), *overrides, "--dir", str(folder), "--plain", *options]
        started.append(Launched([*arguments, *(["--resume"] if resume else [])], folder))
        return started[-1]

    yield start
    for launched in started:
        launched.destroy()


@pytest.fixture
def brake(tmp_path: Path) -> Brake:
    return Brake(tmp_path)
