import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bus.weights import WeightsCorrupt, WeightsMissing, WeightStore


def tensors(value=1.0):
    table = torch.full((5, 3), value)
    return {"embed.weight": table, "layer.bias": torch.arange(3.0), "head.weight": table}


def test_what_was_published_is_loaded_tied_names_included(tmp_path):
    """Tied embeddings are stored once, and share their memory again afterwards."""
    store = WeightStore(tmp_path / "weights")
    published = store.publish(7, tensors())
    loaded = store.load(published)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {n: t.tolist() for n, t in tensors().items()}
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    assert load_file(store.resolve(published.path)).keys() == {"embed.weight", "layer.bias"}


def test_the_same_tensors_give_the_same_bytes_in_any_process(tmp_path):
    """A replayed step must publish under the digest that the log holds."""
    here = WeightStore(tmp_path / "a").publish(3, tensors())
    program = (
        "import torch; from pathlib import Path; from bus.weights import WeightStore; t = torch.full((5, 3), 1.0);"
        "w = {'embed.weight': t, 'layer.bias': torch.arange(3.0), 'head.weight': t};"
        f"print(WeightStore(Path({str(tmp_path / 'b')!r})).publish(3, w).digest)"
    )
    root = Path(__file__).parents[2]
    there = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here.digest


def test_publishing_again_changes_nothing(tmp_path):
    store = WeightStore(tmp_path)
    first = store.publish(3, tensors())
    before = store.resolve(first.path).stat()
    assert store.publish(3, tensors()) == first
    after = store.resolve(first.path).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert [path.name for path in tmp_path.iterdir()] == [first.path]


def test_publishing_again_repairs_a_damaged_file(tmp_path):
    """The error tells people to restart the trainer: then that has to help."""
    store = WeightStore(tmp_path)
    published = store.publish(3, tensors())
    store.resolve(published.path).write_bytes(b"x")
    with pytest.raises(WeightsCorrupt, match="instead of"):
        store.verify(published)
    store.publish(3, tensors())
    store.verify(published)


def test_other_content_has_another_digest_and_another_name(tmp_path):
    """A writer that lost its fence must not overwrite the bytes of the one that holds it."""
    store = WeightStore(tmp_path)
    one, two = store.publish(3, tensors(1.0)), store.publish(3, tensors(2.0))
    assert one.digest != two.digest
    store.verify(one)
    store.verify(two)


def test_files_are_readable_by_workers_of_other_users(tmp_path):
    store = WeightStore(tmp_path)
    mask = os.umask(0o077)
    try:
        path = store.resolve(store.publish(1, tensors()).path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert path.name.startswith("v000001-")


def test_a_single_flipped_bit_is_found(tmp_path):
    store = WeightStore(tmp_path)
    published = store.publish(1, tensors())
    content = bytearray(store.resolve(published.path).read_bytes())
    content[-1] ^= 1
    store.resolve(published.path).write_bytes(content)
    with pytest.raises(WeightsCorrupt, match="digest"):
        store.load(published)


@pytest.mark.parametrize("path", ["v000009-deadbeef.safetensors", "../outside.safetensors", "."])
def test_a_file_that_is_not_in_the_store_is_missing(tmp_path, path):
    """Paths come from messages: they must not lead out of the store."""
    (tmp_path / "outside.safetensors").write_bytes(b"secret")
    store = WeightStore(tmp_path / "weights")
    published = store.publish(1, tensors())
    with pytest.raises(WeightsMissing, match="mount that directory"):
        store.verify(replace(published, path=path))


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_crash_while_publishing_leaves_no_version(tmp_path, monkeypatch, call):
    """Bytes first, then the event: a half-written file must not be under a version's name."""
    store = WeightStore(tmp_path)

    def crash(*_):
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, crash)
        with pytest.raises(OSError, match="power cut"):
            store.publish(1, tensors())
    assert list(tmp_path.iterdir()) == []
    store.verify(store.publish(1, tensors()))


def test_slices_of_one_memory_are_stored_apart(tmp_path):
    """Fused projections are often views; safetensors alone refuses them."""
    base = torch.arange(12.0).reshape(4, 3)
    store = WeightStore(tmp_path)
    loaded = store.load(store.publish(1, {"a": base[:2], "b": base[2:], "t": base.T}))
    assert loaded["a"].tolist() == base[:2].tolist()
    assert loaded["b"].tolist() == base[2:].tolist()
    assert loaded["t"].tolist() == base.T.tolist()


def test_collection_removes_old_versions_but_none_that_is_needed(tmp_path):
    """A checkpoint or a slow worker may still point to an old version."""
    store = WeightStore(tmp_path)
    published = {version: store.publish(version, tensors(version)) for version in range(6)}
    assert store.collect(keep_from_version=4, keep={1}) == [0, 2, 3]
    for version in (1, 4, 5):
        store.verify(published[version])
    with pytest.raises(WeightsMissing):
        store.verify(published[0])


def test_collection_removes_what_a_dead_writer_left_but_not_what_is_being_written(tmp_path):
    store = WeightStore(tmp_path)
    dead, alive = tmp_path / ".tmp-3-17", tmp_path / ".tmp-4-18"
    dead.touch()
    alive.touch()
    os.utime(dead, (time.time() - 7200,) * 2)
    store.collect(0, set())
    assert not dead.exists()
    assert alive.exists()


def test_importing_the_store_imports_no_torch():
    """The bus stays light: the CLI imports it."""
    program = "import sys, bus.weights; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False).returncode == 0
