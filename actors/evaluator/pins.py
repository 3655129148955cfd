"""The files of the versions that an evaluator waits for or works on, kept for it while others are collected."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from schemas import WeightVersion

_NAME = re.compile(r"v(\d+)\.safetensors")


class PinsPort(Protocol):
    """Where an evaluator keeps versions; `Pins` is it."""

    def pin(self, event: WeightVersion) -> Path:
        """The file of a version, which stays there from now on. Raises `bus.weights.WeightsError`."""

    def keep_only(self, versions: set[int]) -> None:
        """Give all other versions up."""


class Pins:
    """One evaluator's folder of full weights: hard links, which cost nothing and outlive the file that they are of.

    `fetch` tells where a version's file is, checked, or raises `bus.weights.WeightsError`. Where links cannot be made,
    from one disk to another, the file is copied. An evaluator that was killed finds its pins again.
    """

    def __init__(self, folder: Path, fetch: Callable[[WeightVersion], Path]) -> None:
        self._folder = folder
        self._fetch = fetch

    def pin(self, event: WeightVersion) -> Path:
        """See `PinsPort`. Pinning again changes nothing."""
        kept = self._folder / f"v{event.version:06d}.safetensors"
        if kept.exists():
            return kept
        source = self._fetch(event)
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = kept.with_suffix(".tmp")
        aside.unlink(missing_ok=True)
        try:
            os.link(source, aside)
        except OSError:
            shutil.copyfile(source, aside)
        aside.rename(kept)
        return kept

    def keep_only(self, versions: set[int]) -> None:
        """See `PinsPort`. With nothing left the folder goes too."""
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            found = _NAME.fullmatch(path.name)
            if found is None or int(found[1]) not in versions:
                path.unlink(missing_ok=True)
        if not versions:
            self._folder.rmdir()
