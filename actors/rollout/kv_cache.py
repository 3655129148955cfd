"""Keys and values of the running sequences, one row a sequence, and the attention that reads them in place.

Shape letters: N running rows, U distinct prompts of a prefill, T padded prompt length, L longest running length,
K key/value heads, G query heads per key/value head, H = K·G, D head size.

Rows 0..N-1 are always the running ones, so a decode step reads each layer's cache through a plain slice, with no gather
and no copy. Entries beyond a row's own length are leftovers of earlier tenants: finite, and masked.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# Each decode step reads the cache from end to end, so one copy of it every so many steps is little beside that; larger
# steps would only hold memory that short answers never use.
GROWTH_TOKENS = 64

ATTENTION = "rollstream_sdpa"


class SlotCache(Cache):
    """Per layer K and V of shape [slots, K, capacity, D], made at the first prefill and grown when a row outgrows it.

    `for_prefill` or `for_decode` says where the next forward's keys and values belong; `update`, which the model calls
    once per layer, puts them there. Memory: layers · 2 · slots · K · capacity · D · bytes of the dtype.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(layers=[])
        self._slots = slots
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows = slice(0, 0)
        self._length = 0
        self._start = 0
        self._positions_N: Tensor | None = None
        self._row_index_N: Tensor | None = None
        self._source_N: Tensor | None = None

    def for_prefill(self, first_row: int, source_N: NDArray[np.int64], start: int = 0) -> None:
        """The next forward puts its sequence number `source_N[i]` into row `first_row + i`, from position `start` on.

        What stands before `start` it sees, which works for one row only.
        """
        self._rows = slice(first_row, first_row + len(source_N))
        self._start = start
        self._source_N = torch.from_numpy(source_N)
        self._positions_N = None

    def for_decode(self, positions_N: Tensor, length: int) -> None:
        """The next forward appends one token at `positions_N[i]` of row i, and sees `length` positions of each row."""
        self._rows = slice(0, len(positions_N))
        self._positions_N = positions_N
        self._row_index_N = torch.arange(len(positions_N), device=positions_N.device)
        self._length = length

    def move(self, to: NDArray[np.int64], source: NDArray[np.int64], length: int) -> None:
        """Copy the first `length` positions of rows `source` over rows `to`."""
        to_rows, source_rows = torch.from_numpy(to), torch.from_numpy(source)
        for entries in (*self._keys, *self._values):
            entries[to_rows, :, :length] = entries[source_rows, :, :length]

    def read(self, row: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """A copy of the first `length` positions of a row: per layer K and V, [K, length, D]."""
        return [
            (keys[row, :, :length].clone(), values[row, :, :length].clone())
            for keys, values in zip(self._keys, self._values, strict=True)
        ]

    def write(self, rows: slice, entry: list[tuple[Tensor, Tensor]]) -> None:
        """Begin rows with what `read` gave."""
        for keys, values, (of_keys, of_values) in zip(self._keys, self._values, entry, strict=True):
            keys[rows, :, : of_keys.shape[1]] = of_keys
            values[rows, :, : of_values.shape[1]] = of_values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model: store a layer's new keys and values, return those that its queries may see."""
        decoding = self._positions_N is not None
        length = self._length if decoding else self._start + key_states.shape[2]
        self._reserve(layer_idx, key_states, value_states, length)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if decoding:
            keys[self._row_index_N, :, self._positions_N] = key_states[:, :, 0]
            values[self._row_index_N, :, self._positions_N] = value_states[:, :, 0]
            return keys[self._rows, :, :length], values[self._rows, :, :length]
        keys[self._rows, :, self._start : length] = key_states[self._source_N]
        values[self._rows, :, self._start : length] = value_states[self._source_N]
        if self._start == 0:
            return key_states, value_states
        return keys[self._rows, :, :length], values[self._rows, :, :length]

    def _reserve(self, layer: int, key_states: Tensor, value_states: Tensor, length: int) -> None:
        if layer == len(self._keys):
            self._keys.append(key_states.new_zeros(self._slots, key_states.shape[1], 0, key_states.shape[3]))
            self._values.append(value_states.new_zeros(self._slots, value_states.shape[1], 0, value_states.shape[3]))
        missing = length - self._keys[layer].shape[2]
        if missing > 0:
            more = -(-missing // GROWTH_TOKENS) * GROWTH_TOKENS
            self._keys[layer] = F.pad(self._keys[layer], (0, 0, 0, more))
            self._values[layer] = F.pad(self._values[layer], (0, 0, 0, more))

    # The rest answers questions that models ask of a cache. All positions and masks are given explicitly, so a sequence
    # length is never derived from it.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: the positions given with each forward are absolute."""
        return 0

    @property
    def is_compileable(self) -> bool:
        """No: its shapes change with the batch."""
        return False


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' SDPA attention, except that one-token queries of grouped heads read K and V without a copy.

    query [N, H, 1, D] is read as [N, K, G, D]: the G heads that share a key become G queries of it, so that one SDPA
    call gives the same sums where transformers would repeat the cache G times. Returns [N, 1, H, D].
    """
    rows, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    if queries != 1 or heads == kv_heads:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return out, None
    folded = query.reshape(rows, kv_heads, heads // kv_heads, query.shape[3])
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, out.shape[3]), None


AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)  # for forwards of the same model outside the decoder
