"""Keys and values of prompts that were prefilled lately, for samples of the same group that come to an engine later."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Entry = list[tuple["Tensor", "Tensor"]]  # per layer K and V, [heads, tokens, head size]


class PromptCache:
    """Least recently used goes first when `bytes_max` are exceeded. It knows one version: `clear` it at an update.

    Keyed by all the tokens that were prefilled, so an entry is exactly what the model would compute again.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.nbytes = 0
        self._entries: OrderedDict[bytes, tuple[Entry, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tokens: bytes) -> Entry | None:
        """The entry of these tokens."""
        found = self._entries.get(tokens)
        if found is None:
            return None
        self._entries.move_to_end(tokens)
        return found[0]

    def put(self, tokens: bytes, entry: Entry) -> None:
        """Keep an entry that is not there yet, unless it alone is too large."""
        nbytes = sum(keys.nbytes + values.nbytes for keys, values in entry)
        if nbytes > self.bytes_max or tokens in self._entries:
            return
        self._entries[tokens] = (entry, nbytes)
        self.nbytes += nbytes
        while self.nbytes > self.bytes_max:
            self.nbytes -= self._entries.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget everything: the weights are about to change."""
        self._entries.clear()
        self.nbytes = 0
