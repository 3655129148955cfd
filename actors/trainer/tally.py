"""Metrics of a step that come from tensors: sums and maxima over tokens and micro-batches, in the end made means."""

from collections.abc import Mapping

import msgpack
import torch
from torch import Tensor

from actors.trainer.ranks import Ranks


class Tally:
    """Sums and maxima by name. Tensors until the end: one transfer a step, not one a metric.

    Every call of `add` must name the same. `loss` is divided by the optimizer steps, what begins with `engine_` by the
    tokens that can be compared, the rest by all tokens. Sums are kept in float64, and ranks add their sums, so a mean
    is that of all tokens, whoever had them.
    """

    def __init__(self, device: torch.device) -> None:
        self._names: tuple[str, ...] = ()
        self._of_maxima: tuple[str, ...] = ()
        self._sums = torch.zeros(0, dtype=torch.float64, device=device)
        self._maxima = torch.zeros(0, device=device)
        self.tokens = 0

    def add(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor], tokens: int) -> None:
        """Add scalars of a micro-batch with so many tokens; maxima are at least 0."""
        values = torch.stack([value.to(torch.float32) for value in sums.values()])
        largest = torch.stack(list(maxima.values()))
        if not self._names:
            self._names, self._of_maxima = tuple(sums), tuple(maxima)
            self._sums = torch.zeros_like(values, dtype=torch.float64)
            self._maxima = torch.zeros_like(largest)
        assert (tuple(sums), tuple(maxima)) == (self._names, self._of_maxima)
        self._sums += values
        self._maxima = torch.maximum(self._maxima, largest)
        self.tokens += tokens

    def metrics(self, minibatches: int, ranks: Ranks) -> dict[str, float]:
        """What the sums of all ranks come to; 0 if nothing was added, without what was never measured."""
        sums = dict(zip(self._names, self._sums.tolist(), strict=True))
        maxima = dict(zip(self._of_maxima, self._maxima.tolist(), strict=True))
        if ranks.count > 1:
            told = [msgpack.unpackb(each) for each in ranks.gather(msgpack.packb([sums, maxima, self.tokens]))]
            names, of_maxima = ({name for part in told for name in part[i]} for i in (0, 1))
            sums = {name: sum(part[0].get(name, 0.0) for part in told) for name in sorted(names)}
            maxima = {name: max(part[1].get(name, 0.0) for part in told) for name in sorted(of_maxima)}
            self.tokens = sum(tokens for _, _, tokens in told)
        sums = dict.fromkeys(SUMS, 0.0) | sums
        maxima = dict.fromkeys(MAXIMA, 0.0) | maxima
        n, compared = max(self.tokens, 1), sums.pop("engine_tokens")
        loss, total, squares = sums.pop("loss"), sums.pop("ess"), sums.pop("ess_squares")
        engine = {name: sums.pop(name) / max(compared, 1.0) for name in list(sums) if name.startswith("engine_")}
        largest = {name: maxima.pop(name) for name in list(maxima) if name.startswith("engine_")}
        return (
            {name: value / n for name, value in sums.items()}
            | maxima
            | {"loss": loss / max(minibatches, 1), "ess": total**2 / squares / n if squares else 0.0}
            | {"tokens_with_gradient": float(self.tokens), "engine_tokens": compared}
            | (engine | largest if compared else {})
        )


SUMS = (
    *("loss", "clip_fraction", "dual_clip_fraction", "ratio_mean", "prox_kl", "entropy"),
    *("behaviour_weight_mean", "ess", "ess_squares", "masked_fraction", "mismatch_kl"),
    *("engine_tokens", "engine_mismatch_k1", "engine_mismatch_k3"),
)
MAXIMA = ("behaviour_weight_max", "behaviour_ratio_max", "engine_mismatch_max")
