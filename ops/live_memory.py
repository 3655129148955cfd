"""What memory tensors take, counted by the byte: the same numbers on a quiet machine and on a busy one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations within it make, while they are alive; `peak` is the most at a time.

    Tensors that share memory count once. What a kernel takes for itself and gives back is not seen, nor is memory
    that numpy made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._nbytes: dict[int, int] = {}  # by the address of the storage

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._made(leaf.untyped_storage())
        return out

    def _made(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._nbytes:
            self._nbytes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._nbytes.pop(key)


class ResidentGrowth:
    """How much more memory this process had, at most, than when this was made; in bytes. Linux only."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        self._before = _status("VmRSS")

    def peak(self) -> int:
        """Since then."""
        return _status("VmHWM") - self._before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(name)
