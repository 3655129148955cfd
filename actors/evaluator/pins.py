"""The files of the versions that an evaluator waits for or works on, kept for it while others are collected."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bus.weights import Local
from schemas import WeightVersion

_NAME = re.compile(r"v(\d+)(?:\.base)?\.safetensors")


class Weights(Protocol):
    """How versions get here; `bus.weights.WeightReader` is it."""

    async def fetch(self, event: WeightVersion) -> Local:
        """Where the version lies here, after its bytes were checked. Raises `bus.weights.WeightsError`."""

    def close(self) -> None:
        """No more versions are wanted."""


class Pins:
    """One evaluator's folder of weights: hard links, which cost nothing and outlive the files that they are of.

    From one disk to another, where no link can be made, the file is copied. An evaluator that was killed finds its pins
    again. One thing at a time is done in the folder: who follows the announcements and who evaluates both pin.
    """

    def __init__(self, folder: Path, weights: Weights) -> None:
        self._folder = folder
        self._weights = weights
        self._changing = asyncio.Lock()

    async def pin(self, event: WeightVersion) -> Local:
        """The version's files, which stay there from now on. Pinning again changes nothing.

        Raises `bus.weights.WeightsError`.
        """
        kept = self._folder / f"v{event.version:06d}.safetensors"
        base = self._folder / f"v{event.version:06d}.base.safetensors" if event.kind == "adapter" else None
        async with self._changing:
            if not kept.exists():  # it comes after its base
                there = await self._weights.fetch(event)
                if base is not None and there.base is not None:
                    await asyncio.to_thread(self._keep, there.base, base)
                await asyncio.to_thread(self._keep, there.path, kept)
        return Local(kept, base)

    def _keep(self, source: Path, kept: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = kept.with_suffix(".tmp")
        aside.unlink(missing_ok=True)
        try:
            os.link(source, aside)
        except OSError:
            shutil.copyfile(source, aside)
        aside.rename(kept)

    async def keep_only(self, versions: Callable[[], set[int]]) -> None:
        """Give all versions up but those it returns once no pin is being made. With none left the folder goes too."""
        async with self._changing:
            await asyncio.to_thread(self._keep_only, versions())

    def _keep_only(self, versions: set[int]) -> None:
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            found = _NAME.fullmatch(path.name)
            if found is None or int(found[1]) not in versions:
                path.unlink(missing_ok=True)
        if not versions:
            self._folder.rmdir()

    def close(self) -> None:
        """No more versions are wanted; what is pinned stays for whoever comes next."""
        self._weights.close()
