"""Checkpoints that are whole or not there: written aside, synced, renamed; verified by digest when loaded.

```
root/step-000012-1f3a90bc/state.pt        torch.save of the state
                          manifest.json   {"step": 12, "files": {"state.pt": {"digest": "sha256-…", "nbytes": …}}}
root/.tmp-…                               what a crash left behind
```
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import torch

from bus.weights import sync_folder

log = structlog.get_logger(__name__)

_STATE, _MANIFEST, _ASIDE = "state.pt", "manifest.json", ".tmp-"


class Checkpoints:
    """The checkpoints of one run: `save` and `load_newest` on a folder, of which the newest `keep` stay."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self.keep = keep

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """See the function `save`."""
        save(self.root, step, state, self.keep)

    def load_newest(self) -> tuple[int, dict[str, Any]] | None:
        """See the function `load_newest`."""
        return load_newest(self.root)

    def steps(self) -> set[int]:
        """Of the checkpoints that are there."""
        return {_step(path) for path in _newest_first(self.root)}


def save(root: Path, step: int, state: Mapping[str, Any], keep: int) -> Path:
    """Write `state` as the checkpoint of `step`, then remove all but the newest `keep` (at least this one).

    `state` may hold tensors, numbers, strings, bytes, lists, tuples, dicts and None: what loads without running code.
    A crash at any instant leaves the older checkpoints as they were. One writer per root.
    """
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{_ASIDE}*"):
        shutil.rmtree(leftover)
    aside = root / f"{_ASIDE}{step}"
    aside.mkdir()
    with open(aside / _STATE, "wb") as file:
        torch.save(dict(state), file)
        _sync(file.fileno(), file.flush)
    description = _describe(aside / _STATE)
    manifest = {"step": step, "files": {_STATE: description}}
    with open(aside / _MANIFEST, "w") as file:
        json.dump(manifest, file)
        _sync(file.fileno(), file.flush)
    sync_folder(aside)

    # The name tells the content: a step saved twice never has to remove the first to make room for the second.
    final = root / f"step-{step:06d}-{description['digest'].removeprefix('sha256-')[:8]}"
    if final.exists():
        shutil.rmtree(aside if _whole(final) else final)
    if aside.exists():
        os.rename(aside, final)
    sync_folder(root)
    others = [path for path in _newest_first(root) if path != final]
    older = [path for path in others if _step(path) != step]
    for path in {*others} - {*older[: max(keep - 1, 0)]}:
        shutil.rmtree(path)
    return final


def load_newest(root: Path, at_most: int | None = None) -> tuple[int, dict[str, Any]] | None:
    """Step and state (tensors on the CPU) of the newest checkpoint that is whole; None if there is none.

    `at_most` leaves those of later steps out. A torn or corrupt one is named in a warning, and the one before it is
    taken.
    """
    for path in _newest_first(root):
        if at_most is not None and _step(path) > at_most:
            continue
        try:
            if not _whole(path):
                raise ValueError("its bytes are not those that the manifest names")
            return _step(path), torch.load(path / _STATE, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever is wrong with it, an older one is better than none
            log.warning("checkpoint_skipped", path=str(path), reason=f"{type(error).__name__}: {error}")
    return None


def _newest_first(root: Path) -> list[Path]:
    return sorted(root.glob("step-*-*"), key=lambda path: (_step(path), path.stat().st_mtime_ns), reverse=True)


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


def _whole(path: Path) -> bool:
    try:
        files = json.loads((path / _MANIFEST).read_text())["files"]
        return all(_describe(path / name) == told for name, told in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"digest": f"sha256-{hashlib.file_digest(file, 'sha256').hexdigest()}", "nbytes": path.stat().st_size}


def _sync(descriptor: int, flush: Any) -> None:
    flush()
    os.fsync(descriptor)
