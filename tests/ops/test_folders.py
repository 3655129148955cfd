"""Runs are many and their names long: the one that a person means must be found, and none be written over."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ops.folders import check_up, find_folder, model_of, new_folder, newest_folder, run_name_of
from schemas import UserError

NOW_S = 1_750_000_000.0


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(folder: Path, at_s: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    os.utime(folder / "run.json", (at_s, at_s))
    return folder


def test_two_runs_of_one_second_get_two_folders() -> None:
    """Scripts start several at once."""
    first = made(new_folder("total", NOW_S), NOW_S)
    second = new_folder("total", NOW_S)
    assert first != second
    assert first.name.startswith("total-2025")


def test_the_newest_run_of_a_recipe_is_not_that_of_a_recipe_with_a_longer_name() -> None:
    """`--resume` of `total` must never go on with `total-long`."""
    total = made(new_folder("total", NOW_S), NOW_S)
    longer = made(new_folder("total-long", NOW_S + 9), NOW_S + 9)
    assert newest_folder("total") == total
    assert newest_folder() == longer
    with pytest.raises(UserError, match="no run of other"):
        newest_folder("other")


def test_a_run_is_found_by_path_by_name_and_by_default() -> None:
    """As people name it."""
    folder = made(new_folder("total", NOW_S), NOW_S)
    assert find_folder(None) == find_folder(folder.name) == find_folder(str(folder)) == folder


def test_the_model_of_a_run_is_there_once_it_has_ended() -> None:
    """Anything else is a model's own name, and transformers' to judge."""
    folder = made(new_folder("total", NOW_S), NOW_S)
    with pytest.raises(UserError, match="no model yet"):
        model_of(folder.name)
    (folder / "model").mkdir()
    assert model_of(folder.name) == str(folder / "model")
    assert model_of("org/model") == "org/model"


async def test_a_run_whose_server_is_gone_is_not_up() -> None:
    """Who joins it or scales it is told so at once, not of a refused connection."""
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # and nobody listens
    url = f"nats://user:password@127.0.0.1:{closed.getsockname()[1]}"
    with closed, pytest.raises(UserError, match="The run total is not up") as told:
        await check_up("total", url, Path("runs/total"))
    assert "--resume --dir runs/total" in told.value.remedy
    with socket.create_server(("127.0.0.1", 0)) as server:
        await check_up("total", f"nats://127.0.0.1:{server.getsockname()[1]}", Path("runs/total"))


@pytest.mark.parametrize(
    ("name", "usable"),
    [("my_run", "my-run"), ("Ünï Run.2", "uni-run-2"), ("-a", "a"), ("__", "run"), ("x" * 70, "x" * 63)],
)
def test_a_folder_whose_name_no_run_can_have_is_told_with_one_that_can(tmp_path: Path, name: str, usable: str) -> None:
    """The name of a run is that of its folder; the error spoke of a bus."""
    with pytest.raises(UserError) as told:
        run_name_of(tmp_path / name)
    assert str(tmp_path / name) in told.value.message
    assert str(told.value.remedy).endswith(f" such as {tmp_path / usable}.")
    assert run_name_of(tmp_path / usable) == usable
