"""Recovery rests on checkpoints that are whole or passed over, whatever happened to the disk or the process."""

import itertools
import json
import os
import shutil

import pytest
import torch
from structlog.testing import capture_logs

from actors.trainer import checkpoint
from actors.trainer.retention import Judged, Retention

TWO, THREE = Retention(2), Retention(3)


def state(value):
    return {"model": {"w": torch.full((64,), float(value))}, "sequences": {"batches": value}, "note": None}


def value_of(loaded):
    assert loaded is not None
    assert loaded[1]["model"]["w"].unique().item() == loaded[1]["sequences"]["batches"]
    return loaded[0], loaded[1]["sequences"]["batches"]


def test_what_was_saved_is_loaded(tmp_path):
    path = checkpoint.save(tmp_path / "new", 12, state(5), TWO)
    assert path.is_dir()
    assert value_of(checkpoint.load_newest(tmp_path / "new")) == (12, 5)


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path):
    with capture_logs() as logs:
        assert checkpoint.load_newest(tmp_path / "absent") is None
    assert logs == []


def test_only_the_newest_are_kept(tmp_path):
    for step in (9, 10, 100, 1000000, 1000001):
        checkpoint.save(tmp_path, step, state(step), TWO)
    assert checkpoint.steps(tmp_path) == {1000000, 1000001}
    assert len(list(tmp_path.iterdir())) == 2


def test_every_nth_is_kept_for_ever(tmp_path):
    for step in range(2, 21, 2):
        checkpoint.save(tmp_path, step, state(step), Retention(2, every=6))
    assert checkpoint.steps(tmp_path) == {6, 12, 18, 20}


def test_the_best_is_kept_and_marked_and_the_mark_follows_a_better_one(tmp_path):
    """Also what is being evaluated stays: it may be the best to come."""
    policy = Retention(1)
    marked = []
    for step, judged in (
        (1, Judged()),
        (2, Judged({0: 0.9}, frozenset({1}))),
        (3, Judged({0: 0.9, 1: 0.2}, frozenset({3}))),
        (4, Judged({1: 0.2, 3: 0.2})),
        (5, Judged({1: 0.2, 3: 0.2, 4: 0.8})),
        (6, Judged({1: 0.2, 3: 0.2, 4: 0.8})),
    ):
        checkpoint.save(tmp_path, step, state(step), policy, judged)
        mark = tmp_path / checkpoint.BEST
        marked.append(int(os.readlink(mark).split("-")[1]) if mark.is_symlink() else None)
        assert marked[-1] is None or mark.resolve().is_dir()
    assert marked == [None, None, 1, 1, 4, 4]
    assert checkpoint.steps(tmp_path) == {4, 6}


def test_where_there_are_no_links_the_best_is_kept_unmarked(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    checkpoint.save(tmp_path, 1, state(1))
    with capture_logs() as logs:
        checkpoint.save(tmp_path, 2, state(2), judged=Judged({1: 0.5}))
    assert checkpoint.steps(tmp_path) == {1, 2}
    assert [entry["event"] for entry in logs] == ["best_checkpoint_not_marked"]


class PowerCutError(Exception):
    pass


CUT = (
    *((os, name) for name in ("fsync", "rename", "open", "symlink", "replace")),
    (shutil, "rmtree"),
    (torch, "save"),
    (json, "dump"),
)


def cut_at(patched, phase, calls):
    """Let call number `phase` of those that change the disk, and all after it, raise."""

    def fragile(original):
        def wrapper(*arguments, **options):
            if next(calls) >= phase:
                raise PowerCutError
            return original(*arguments, **options)

        return wrapper

    for module, name in CUT:
        patched.setattr(module, name, fragile(getattr(module, name)))


@pytest.mark.parametrize(("step", "value"), [(20, 2), (10, 2), (10, 1)])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("phase", range(16))
def test_a_crash_at_any_point_leaves_a_whole_checkpoint(tmp_path, monkeypatch, phase, keep, step, value):
    """Recovery depends on it; also when a step is saved again after one from further back."""
    judged = Judged({5: 0.1, 10: 0.5})
    checkpoint.save(tmp_path, 5, state(0), TWO, judged)
    checkpoint.save(tmp_path, 10, state(1), TWO, judged)
    with monkeypatch.context() as patched:
        cut_at(patched, phase, itertools.count())
        try:
            checkpoint.save(tmp_path, step, state(value), Retention(keep), Judged({5: 0.1, 10: 0.5, 20: 0.9}))
            crashed = False
        except PowerCutError:
            crashed = True
    with capture_logs() as logs:
        found = value_of(checkpoint.load_newest(tmp_path))
    assert found in {(10, 1), (step, value)}
    assert crashed or found == (step, value)
    assert logs == []  # a torn one is never under a checkpoint's name
    assert (tmp_path / checkpoint.BEST).resolve(strict=True).is_dir()

    checkpoint.save(tmp_path, 30, state(3))  # and the next one cleans up
    assert checkpoint.steps(tmp_path) == {30}
    assert {path.name[:5] for path in tmp_path.iterdir()} <= {"step-", "best"}


def test_the_crash_test_reaches_the_last_phase(tmp_path, monkeypatch):
    """If saving took more calls than the crash test tries, late phases would go untested."""
    calls = itertools.count()
    for step in (5, 10):
        checkpoint.save(tmp_path, step, state(1), TWO, Judged({5: 0.1, 10: 0.5}))
    with monkeypatch.context() as patched:
        cut_at(patched, 1000, calls)
        checkpoint.save(tmp_path, 20, state(2), judged=Judged({20: 0.9}))
    assert 10 <= next(calls) <= 16


def truncated(name, share):
    def damage(path):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[: int(len(whole) * share)] if share < 1 else whole[:-1])

    damage.__name__ = f"{name} cut at {share}"
    return damage


def flipped(name, share):
    def damage(path):
        content = bytearray((path / name).read_bytes())
        content[int(len(content) * share)] ^= 1
        (path / name).write_bytes(content)

    damage.__name__ = f"{name} flipped at {share}"
    return damage


def rewritten(**changes):
    def damage(path):
        manifest = json.loads((path / "manifest.json").read_text()) | changes
        (path / "manifest.json").write_text(json.dumps(manifest))

    damage.__name__ = f"manifest with {changes}"
    return damage


def removed(path):
    shutil.rmtree(path)
    path.mkdir()


def unlinked(name):
    return lambda path: (path / name).unlink()


def of_another_step(path):
    """What a careless copy by hand makes."""
    (other,) = (each for each in path.parent.glob("step-*") if each != path and "step-000010" in each.name)
    for name in ("state.pt", "manifest.json"):
        shutil.copy(other / name, path / name)


def a_folder(path):
    (path / "state.pt").unlink()
    (path / "state.pt").mkdir()


DAMAGES = [
    *(truncated(name, share) for name in ("state.pt", "manifest.json") for share in (0, 0.01, 0.3, 0.9, 1)),
    *(flipped("state.pt", share) for share in (0, 0.2, 0.5, 0.7, 0.999)),
    *(flipped("manifest.json", share) for share in (0.1, 0.4, 0.75)),
    rewritten(step=21),
    rewritten(files={}),
    rewritten(files=None),
    rewritten(files={"state.pt": "sha256-0"}),
    unlinked("state.pt"),
    unlinked("manifest.json"),
    removed,
    of_another_step,
    a_folder,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, damage):
    checkpoint.save(tmp_path, 10, state(1), THREE)
    damage(checkpoint.save(tmp_path, 20, state(2), THREE))
    with capture_logs() as logs:
        assert value_of(checkpoint.load_newest(tmp_path)) == (10, 1)
        assert checkpoint.load(tmp_path, 20) is None
    assert {(entry["event"], entry["log_level"]) for entry in logs} == {("checkpoint_skipped", "warning")}
    assert "step-000020" in logs[0]["path"]


def test_no_byte_may_differ(tmp_path):
    """All over a small checkpoint: padding between the parts of the archive, which torch would not miss, included."""
    path = checkpoint.save(tmp_path, 20, {"version": 20}, THREE)
    whole = (path / "state.pt").read_bytes()
    with capture_logs():
        for place in range(0, len(whole), 7):
            (path / "state.pt").write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
            assert checkpoint.load_newest(tmp_path) is None, place
    (path / "state.pt").write_bytes(whole)
    assert checkpoint.load_newest(tmp_path) == (20, {"version": 20})


def test_one_that_may_not_be_read_is_passed_over(tmp_path, monkeypatch):
    for step in (10, 20):
        checkpoint.save(tmp_path, step, state(step), THREE)
    describe = checkpoint._describe

    def refused(path):  # a mode would not stop root
        if "step-000020" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return describe(path)

    monkeypatch.setattr(checkpoint, "_describe", refused)
    with capture_logs() as logs:
        assert value_of(checkpoint.load_newest(tmp_path)) == (10, 10)
    assert "Permission denied" in logs[0]["reason"]


def test_of_three_with_both_newest_damaged_the_third_is_taken_and_of_none_whole_all_are_named(tmp_path):
    paths = [checkpoint.save(tmp_path, step, state(step), THREE) for step in (10, 20, 30)]
    truncated("state.pt", 0.5)(paths[2])
    truncated("manifest.json", 0)(paths[1])
    with capture_logs() as logs:
        assert value_of(checkpoint.load_newest(tmp_path)) == (10, 10)
    assert [entry["event"] for entry in logs] == ["checkpoint_skipped"] * 2
    removed(paths[0])
    with capture_logs() as logs:
        assert checkpoint.load_newest(tmp_path) is None
    assert [entry["event"] for entry in logs] == [*["checkpoint_skipped"] * 3, "no_checkpoint_usable"]
    assert logs[-1]["skipped"] == 3


def test_damaged_ones_of_later_steps_do_not_outlast_whole_ones(tmp_path):
    """They are newer by name, so they would take the places of those that can be used."""
    for path in [checkpoint.save(tmp_path, step, state(step), THREE) for step in (10, 20, 30)][1:]:
        truncated("state.pt", 0.5)(path)
    checkpoint.save(tmp_path, 15, state(15), TWO)
    assert checkpoint.steps(tmp_path) == {10, 15}


def test_whole_ones_of_later_steps_stay(tmp_path):
    """Who saves an earlier step than is there may be a trainer that was overtaken and does not know it yet."""
    for step in (20, 30):
        checkpoint.save(tmp_path, step, state(step), TWO)
    checkpoint.save(tmp_path, 15, state(15), TWO)
    assert checkpoint.steps(tmp_path) == {15, 20, 30}


def test_what_is_no_checkpoint_is_let_alone(tmp_path):
    (tmp_path / "step-notes-of-mine").mkdir()
    (tmp_path / "step-by-step.txt").write_text("mine")
    (tmp_path / ".tmp-best").symlink_to("step-000001-00000000")  # of a crash
    checkpoint.save(tmp_path, 20, state(2))
    assert checkpoint.steps(tmp_path) == {20}
    assert sorted(path.name[:9] for path in tmp_path.iterdir()) == ["step-0000", "step-by-s", "step-note"]


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(tmp_path):
    path = checkpoint.save(tmp_path, 20, state(2), THREE)
    (path / "manifest.json").write_text("{")
    checkpoint.save(tmp_path, 20, state(2), THREE)
    assert value_of(checkpoint.load_newest(tmp_path)) == (20, 2)


def test_a_checkpoint_of_an_earlier_step_can_be_asked_for(tmp_path):
    """A replay from step 15 must not start behind it."""
    for step in (10, 20):
        checkpoint.save(tmp_path, step, state(step), THREE)
    assert value_of(checkpoint.load_newest(tmp_path, at_most=19)) == (10, 10)
    assert checkpoint.load_newest(tmp_path, at_most=9) is None
    assert checkpoint.load(tmp_path, 10)["sequences"] == {"batches": 10}
    assert checkpoint.load(tmp_path, 15) is None


class Trap:
    def __reduce__(self):
        return (os.system, ("true",))


def test_a_checkpoint_that_would_run_code_is_not_loaded(tmp_path):
    """Answers and files are data; a checkpoint directory may be shared."""
    checkpoint.save(tmp_path, 20, {"trap": Trap()})
    with capture_logs() as logs:
        assert checkpoint.load_newest(tmp_path) is None
    assert "UnpicklingError" in logs[0]["reason"]
