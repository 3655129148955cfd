"""A version is taken out of a run as what `from_pretrained` loads, or it is said why that cannot be."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ops.export import export_version
from ops.recording.reader import open_recording
from schemas import Evaluation, UserError
from tests.ops.recorded_run import Altered, altered

LAST = 4


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """The folder of the recorded run, to be damaged."""
    return Path(shutil.copytree(recorded.parent, tmp_path / "run"))


async def log_of(recorded: Path, scores: dict[int, float]) -> Altered:
    with open_recording(recorded) as source:
        log = await altered(source)
    for version, reward in scores.items():
        log.put(Evaluation(version=version, data="held-out", reward=reward, count=1, verdicts={"scored": 1}))
    return log


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


async def test_the_last_version_is_the_model_that_the_run_ended_with(
    recorded: Path, folder: Path, tmp_path: Path
) -> None:
    log = await log_of(recorded, {})
    assert str(tmp_path / "out") in await export_version(log, folder, "last", tmp_path / "out")
    assert same(weights_of(tmp_path / "out"), weights_of(folder / "model"))
    with pytest.raises(UserError, match="there already"):
        await export_version(log, folder, "last", tmp_path / "out")


async def test_a_version_comes_from_its_checkpoint_or_from_its_published_weights_alike(
    recorded: Path, folder: Path, tmp_path: Path
) -> None:
    """In a run whose workers hold float32, so that both are the same numbers."""
    log = await log_of(recorded, {})
    await export_version(log, folder, "3", tmp_path / "checkpoint")
    shutil.rmtree(folder / "checkpoints")
    await export_version(log, folder, "3", tmp_path / "weights")
    assert same(weights_of(tmp_path / "checkpoint"), weights_of(tmp_path / "weights"))
    assert not same(weights_of(tmp_path / "weights"), weights_of(folder / "model"))


async def test_the_best_is_that_of_the_evaluations_and_if_it_is_gone_the_best_that_is_kept(
    recorded: Path, folder: Path, tmp_path: Path
) -> None:
    log = await log_of(recorded, {0: 0.1, 2: 0.9, 3: 0.8, 4: 0.2})
    told = await export_version(log, folder, "best", tmp_path / "best")
    assert told.startswith("version 2 (held-out reward 0.900)")
    for file in (folder / "weights").glob("v00000[12]*"):
        file.unlink()
    told = await export_version(log, folder, "best", tmp_path / "kept")
    assert told.startswith("version 2 (held-out reward 0.900) is not kept any more\nversion 3")
    await export_version(log, folder, "3", tmp_path / "three")
    assert same(weights_of(tmp_path / "kept"), weights_of(tmp_path / "three"))


@pytest.mark.parametrize(("wanted", "says"), [("5", "There is no version 5"), ("newest", "no version newest")])
async def test_a_version_that_never_was_is_refused(
    recorded: Path, folder: Path, tmp_path: Path, wanted: str, says: str
) -> None:
    with pytest.raises(UserError, match=says) as refusal:
        await export_version(await log_of(recorded, {}), folder, wanted, tmp_path / "out")
    assert f"from 0 to {LAST}" in refusal.value.remedy


async def test_without_evaluations_there_is_no_best_and_what_is_gone_is_told(
    recorded: Path, folder: Path, tmp_path: Path
) -> None:
    log = await log_of(recorded, {})
    with pytest.raises(UserError, match="No version of this run was evaluated"):
        await export_version(log, folder, "best", tmp_path / "out")
    for file in (folder / "weights").glob("v00000[12]*"):
        file.unlink()
    with pytest.raises(UserError, match="version 1 is not kept any more") as refusal:
        await export_version(log, folder, "1", tmp_path / "out")
    assert "Kept are 4, 3" in refusal.value.remedy
    with contextlib.suppress(FileNotFoundError):
        assert list((tmp_path / "out").iterdir()) == []
