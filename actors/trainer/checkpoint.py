"""Checkpoints that are whole or not there: written aside, synced, renamed; verified by digest when loaded.

```
root/step-000012-1f3a90bc/state.pt        torch.save of the state
                          manifest.json   {"step": 12, "files": {"state.pt": {"digest": "sha256-…", "nbytes": …}}}
root/best -> step-000012-1f3a90bc         the best by evaluation, when the newest was saved
root/.tmp-…                               what a crash left behind
```
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import torch

from actors.trainer.retention import NEWEST, NOTHING_JUDGED, Judged, Retention, best_of
from bus.weights import sync_folder

log = structlog.get_logger(__name__)

BEST = "best"
_STATE, _MANIFEST, _ASIDE = "state.pt", "manifest.json", ".tmp-"
_NAME = re.compile(r"step-(\d{6,12})-([0-9a-f]{8})")


class Checkpoints:
    """The checkpoints of one run: those in a folder, of which `retention` tells what stays."""

    def __init__(self, root: Path, retention: Retention) -> None:
        self.root = root
        self.retention = retention

    def save(self, step: int, state: Mapping[str, Any], judged: Judged = NOTHING_JUDGED) -> None:
        """See the function `save`."""
        save(self.root, step, state, self.retention, judged)

    def load_newest(self) -> tuple[int, dict[str, Any]] | None:
        """See the function `load_newest`."""
        return load_newest(self.root)

    def steps(self) -> set[int]:
        """See the function `steps`."""
        return steps(self.root)


def save(
    root: Path,
    step: int,
    state: Mapping[str, Any],
    retention: Retention = NEWEST,
    judged: Judged = NOTHING_JUDGED,
) -> Path:
    """Write `state` as the checkpoint of `step`, then remove what does not stay by `retention`; this one does.

    `state` may hold tensors, numbers, strings, bytes, lists, tuples, dicts and None: what loads without running code.
    A crash at any instant leaves the older checkpoints as they were. One writer per root.
    """
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{_ASIDE}*"):
        _remove(leftover)
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
        _remove(aside if _fault(final) is None else final)
    if aside.exists():
        os.rename(aside, final)
    sync_folder(root)
    _remove_others(final, retention, judged)
    return final


def load_newest(root: Path, at_most: int | None = None) -> tuple[int, dict[str, Any]] | None:
    """Step and state (tensors on the CPU) of the newest checkpoint that is whole; None if there is none.

    `at_most` leaves those of later steps out. A torn or corrupt one is named in a warning, and the one before it is
    taken.
    """
    skipped = 0
    for path in _newest_first(root):
        if at_most is not None and _step(path) > at_most:
            continue
        state = _load(path)
        if state is not None:
            return _step(path), state
        skipped += 1
    if skipped:
        log.warning("no_checkpoint_usable", folder=str(root), skipped=skipped)
    return None


def load(root: Path, step: int) -> dict[str, Any] | None:
    """The state of the checkpoint of `step`; None if there is none that is whole."""
    found = load_newest(root, at_most=step) if step in steps(root) else None
    return found[1] if found is not None and found[0] == step else None


def steps(root: Path) -> set[int]:
    """Of the checkpoints that are there, whole or not."""
    return {_step(path) for path in _newest_first(root)}


def _load(path: Path) -> dict[str, Any] | None:
    try:
        if fault := _fault(path):
            raise ValueError(fault)
        state: dict[str, Any] = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is wrong with it, an older one is better than none
        log.warning("checkpoint_skipped", path=str(path), reason=f"{type(error).__name__}: {error}")
        return None
    return state


def _remove_others(final: Path, retention: Retention, judged: Judged) -> None:
    """Remove what does not stay beside `final`, which was just saved, after the best was marked."""
    step = _step(final)
    others = {_step(path): path for path in reversed(_newest_first(final.parent)) if path != final}
    # One of a later step was passed over when we began; it would outlast whole ones.
    damaged = {other for other, path in others.items() if other > step and _fault(path) is not None}
    stay = retention.kept({step, *others} - damaged, judged) | {step}
    best = best_of(stay, judged)
    if best is not None:
        _mark_best(final if best == step else others[best])
    for path in _newest_first(final.parent):
        if path != final and (_step(path) not in stay or _step(path) == step):
            _remove(path)


def _mark_best(path: Path) -> None:
    """Let the link `best` beside a checkpoint point to it, if the file system has links."""
    link, aside = path.with_name(BEST), path.with_name(f"{_ASIDE}{BEST}")
    try:
        if not link.is_symlink() or os.readlink(link) != path.name:
            os.symlink(path.name, aside)
            os.replace(aside, link)
    except OSError as error:
        log.warning("best_checkpoint_not_marked", path=str(path), reason=str(error))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _newest_first(root: Path) -> list[Path]:
    found: list[tuple[int, int, Path]] = []
    for path in root.glob("step-*"):
        if _NAME.fullmatch(path.name):
            try:
                found.append((_step(path), path.stat().st_mtime_ns, path))
            except OSError:  # it was just removed
                continue
    return [path for *_, path in sorted(found, reverse=True)]


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, None if it is whole."""
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        told_step, told = manifest["step"], manifest["files"][_STATE]
        if told_step != _step(path):
            return f"its manifest is of step {told_step}"
        if _describe(path / _STATE) != told:
            return "its bytes are not those that the manifest names"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"digest": f"sha256-{hashlib.file_digest(file, 'sha256').hexdigest()}", "nbytes": path.stat().st_size}


def _sync(descriptor: int, flush: Any) -> None:
    flush()
    os.fsync(descriptor)
