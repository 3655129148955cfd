import os
import shutil

import pytest
import torch
from structlog.testing import capture_logs

from actors.trainer import checkpoint


def state(value):
    return {"model": {"w": torch.full((64,), float(value))}, "sequences": {"batches": value}, "note": None}


def value_of(loaded):
    assert loaded is not None
    assert loaded[1]["model"]["w"].unique().item() == loaded[1]["sequences"]["batches"]
    return loaded[0], loaded[1]["sequences"]["batches"]


def test_what_was_saved_is_loaded(tmp_path):
    path = checkpoint.save(tmp_path / "new", 12, state(5), keep=2)
    assert path.is_dir()
    assert value_of(checkpoint.load_newest(tmp_path / "new")) == (12, 5)


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path):
    assert checkpoint.load_newest(tmp_path / "absent") is None


def test_only_the_newest_are_kept(tmp_path):
    for step in (9, 10, 100, 1000000, 1000001):
        checkpoint.save(tmp_path, step, state(step), keep=2)
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.iterdir()) == [1000000, 1000001]


class PowerCutError(Exception):
    pass


@pytest.mark.parametrize(("step", "value"), [(20, 2), (10, 2), (10, 1)])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("phase", range(12))
def test_a_crash_at_any_point_leaves_a_whole_checkpoint(tmp_path, monkeypatch, phase, keep, step, value):
    """Recovery depends on it; also when a step is saved again after one from further back."""
    checkpoint.save(tmp_path, 10, state(1), keep)
    calls = 0

    def fragile(original):
        def wrapper(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == phase + 1:
                raise PowerCutError
            return original(*arguments, **options)

        return wrapper

    with monkeypatch.context() as patched:
        for module, name in ((os, "fsync"), (os, "rename"), (os, "open"), (shutil, "rmtree"), (torch, "save")):
            patched.setattr(module, name, fragile(getattr(module, name)))
        try:
            checkpoint.save(tmp_path, step, state(value), keep)
            crashed = False
        except PowerCutError:
            crashed = True
    with capture_logs() as logs:
        found = value_of(checkpoint.load_newest(tmp_path))
    assert found in {(10, 1), (step, value)}
    assert crashed or found == (step, value)
    assert logs == []  # a torn one is never under a checkpoint's name

    checkpoint.save(tmp_path, 30, state(3), keep=1)  # and the next one cleans up
    assert [path.name.split("-")[1] for path in tmp_path.iterdir()] == ["000030"]


def test_the_crash_test_reaches_the_last_phase(tmp_path, monkeypatch):
    """If saving took more calls than the crash test tries, late phases would go untested."""
    calls = []
    for module, name in ((os, "fsync"), (os, "rename"), (os, "open"), (shutil, "rmtree"), (torch, "save")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, original=original, **k: (calls.append(1), original(*a, **k))[1])
    checkpoint.save(tmp_path, 10, state(1), keep=1)
    calls.clear()
    checkpoint.save(tmp_path, 20, state(2), keep=1)
    assert 6 <= len(calls) <= 12


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "state.pt").write_bytes((path / "state.pt").read_bytes()[:-7]),
        lambda path: (path / "state.pt").write_bytes(bytes(b ^ 1 for b in (path / "state.pt").read_bytes())),
        lambda path: (path / "state.pt").unlink(),
        lambda path: (path / "manifest.json").write_text("{"),
        lambda path: (path / "manifest.json").unlink(),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, damage):
    checkpoint.save(tmp_path, 10, state(1), keep=3)
    damage(checkpoint.save(tmp_path, 20, state(2), keep=3))
    with capture_logs() as logs:
        assert value_of(checkpoint.load_newest(tmp_path)) == (10, 1)
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("checkpoint_skipped", "warning")]
    assert "step-000020" in logs[0]["path"]


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(tmp_path):
    path = checkpoint.save(tmp_path, 20, state(2), keep=3)
    (path / "manifest.json").write_text("{")
    checkpoint.save(tmp_path, 20, state(2), keep=3)
    assert value_of(checkpoint.load_newest(tmp_path)) == (20, 2)


def test_a_checkpoint_of_an_earlier_step_can_be_asked_for(tmp_path):
    """A replay from step 15 must not start behind it."""
    for step in (10, 20):
        checkpoint.save(tmp_path, step, state(step), keep=3)
    assert value_of(checkpoint.load_newest(tmp_path, at_most=19)) == (10, 10)
    assert checkpoint.load_newest(tmp_path, at_most=9) is None


class Trap:
    def __reduce__(self):
        return (os.system, ("true",))


def test_a_checkpoint_that_would_run_code_is_not_loaded(tmp_path):
    """Answers and files are data; a checkpoint directory may be shared."""
    checkpoint.save(tmp_path, 20, {"trap": Trap()}, keep=1)
    with capture_logs() as logs:
        assert checkpoint.load_newest(tmp_path) is None
    assert "UnpicklingError" in logs[0]["reason"]
