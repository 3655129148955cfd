"""Metrics of a step: sums over trained tokens and micro-batches, turned into means at its end."""

from collections.abc import Mapping

import msgpack
import torch
from torch import Tensor

from actors.trainer.ranks import Ranks


class Tally:
    """Sums by name. Tensors until the end: one transfer a step, not one a metric.

    Every call of `add` must name the same sums. `loss` is divided by the optimizer steps, `weight_squared` and the
    weights become the effective sample size, the rest is divided by the tokens.
    """

    def __init__(self, device: torch.device) -> None:
        self._names: tuple[str, ...] = ()
        self._sums = torch.zeros(0, device=device)
        self._largest_weight = torch.zeros((), device=device)
        self.tokens = 0

    def add(self, sums: Mapping[str, Tensor], weight: Tensor) -> None:
        """Add scalars; `weight` [n] is the behaviour weight of the micro-batch's tokens."""
        values = torch.stack([value.to(torch.float32) for value in sums.values()])
        if not self._names:
            self._names, self._sums = tuple(sums), torch.zeros_like(values)
        assert tuple(sums) == self._names
        self._sums += values
        self._largest_weight = torch.maximum(self._largest_weight, weight.max())
        self.tokens += len(weight)

    def gathered(self, ranks: Ranks) -> "Tally":
        """The same of all ranks together."""
        if ranks.count == 1:
            return self
        own = [dict(zip(self._names, self._sums.tolist(), strict=True)), self._largest_weight.item(), self.tokens]
        told = [msgpack.unpackb(each) for each in ranks.gather(msgpack.packb(own))]
        names = next((tuple(sums) for sums, _, _ in told if sums), ())
        whole = Tally(self._sums.device)
        whole._names = names
        whole._sums = torch.tensor([sum(sums.get(name, 0.0) for sums, _, _ in told) for name in names])
        whole._largest_weight = torch.tensor(max(largest for _, largest, _ in told))
        whole.tokens = sum(tokens for _, _, tokens in told)
        return whole

    def metrics(self, minibatches: int) -> dict[str, float]:
        """What the sums come to; all 0 if nothing was added."""
        values = dict.fromkeys(ALWAYS, 0.0) | dict(zip(self._names, self._sums.tolist(), strict=True))
        loss, squared = values.pop("loss"), values.pop("weight_squared")
        total, n = values["behaviour_weight_mean"], max(self.tokens, 1)
        return {name: value / n for name, value in values.items()} | {
            "loss": loss / max(minibatches, 1),
            "ess": total**2 / squared / n if squared else 0.0,
            "behaviour_weight_max": self._largest_weight.item(),
        }


ALWAYS = (
    *("loss", "clip_fraction", "dual_clip_fraction", "ratio_mean", "prox_kl", "entropy"),
    *("behaviour_weight_mean", "weight_squared", "masked_fraction", "mismatch_kl"),
)
