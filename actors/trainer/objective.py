"""The objective on one micro-batch: policy loss, corrections and masks, KL penalty, entropy bonus; and its metrics.

Shapes: n = trained tokens of the micro-batch, flat.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.trainer.config import TrainerConfig
from actors.trainer.corrections import behaviour_weight, log_ratio
from actors.trainer.kl import kl
from actors.trainer.losses import Loss, LossInputs
from actors.trainer.opsm import off_policy_sequences
from actors.trainer.plan import Micro
from actors.trainer.proximal import approximate


@dataclass(frozen=True, slots=True)
class Scored:
    """The sum over tokens, differentiable, and what to tell of it."""

    total: Tensor
    sums: dict[str, Tensor]  # scalars, sums over tokens
    weight: Tensor  # [n], the behaviour weight used, 1 for a coupled loss, 0 where masked


class Objective:
    """What one token adds to the loss, as the config says.

    ```
    total = Σ scale·(w·keep·pg + kl.coef·KL(θ ‖ reference) − entropy_coef·H)
    ```
    `scale` is the aggregation's, `w` the behaviour weight, `keep` the masks of M2PO and OPSM. A token that is masked
    still has its KL penalty and its entropy: both concern the policy as it is.
    """

    def __init__(self, loss: Loss, config: TrainerConfig) -> None:
        self._loss = loss
        self._config = config
        self._penalised = config.kl.coef > 0 and config.kl.place == "loss"

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss needs logprobs under the weights before the step."""
        return not self._loss.coupled and self._config.proximal == "recompute"

    @property
    def touches_every_token(self) -> bool:
        """Whether tokens of advantage 0 have a gradient."""
        return self._penalised or self._config.entropy_coef > 0

    def __call__(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        micro: Micro,
        *,
        proximal: Tensor | None,
        keep: Tensor | None,
        current_version: int,
    ) -> Scored:
        """The objective on `micro`; `logprobs`, `entropy`, `proximal` float32 [n], `keep` bool [n].

        `proximal` None: the current policy stands in for it, unless the config approximates it.
        """
        config, tokens = self._config, micro.tokens
        sequence, sequences = micro.batch.sequence, len(micro.batch.sequences)
        current = logprobs.detach()
        behaviour = torch.where(tokens["behaviour"].isfinite(), tokens["behaviour"], current)
        prox = current if proximal is None else proximal
        if config.proximal != "recompute" and not self._loss.coupled:
            versions = tokens.get("versions", torch.zeros_like(sequence))  # "rollout" asks for none
            prox = approximate(config.proximal, behaviour, current, versions, current_version)

        corrected = behaviour_weight(prox, behaviour, sequence, sequences, config.behaviour_weight)
        weight, changed = corrected.weight, corrected.changed
        if self._loss.coupled:
            weight, changed = torch.ones_like(current), torch.zeros_like(changed)
        dropped = torch.zeros_like(changed) if keep is None else ~keep
        if config.opsm_threshold is not None:
            dropped = dropped | off_policy_sequences(
                prox, behaviour, tokens["advantages"], sequence, sequences, config.opsm_threshold
            )
        if keep is not None or config.opsm_threshold is not None:
            weight = weight.masked_fill(dropped, 0.0)
        scale = tokens.get("scale")
        anchor = behaviour if self._loss.coupled else prox
        loss = self._loss.function(
            LossInputs(
                logprobs=logprobs,
                proximal=anchor,
                behaviour=behaviour,
                advantages=tokens["advantages"],
                weight=weight if scale is None else weight * scale,
                sequence=sequence,
                sequences=sequences,
            ),
            config,
        )
        total = loss.total
        mismatch = kl(-log_ratio(prox, behaviour), torch.zeros_like(prox), "k3")
        sums = {
            "clip_fraction": loss.clipped.sum(),
            "dual_clip_fraction": loss.dual_clipped.sum(),
            "ratio_mean": loss.ratio.sum(),
            "prox_kl": kl(anchor, current, "k3").sum(),
            "entropy": entropy.detach().sum(),
            "behaviour_weight_mean": weight.sum(),
            "weight_squared": weight.square().sum(),
            "masked_fraction": (changed | dropped).sum(),
            "mismatch_kl": mismatch.sum(),
        }
        if "reference" in tokens:
            sums["reference_kl"] = kl(current, tokens["reference"], "k3").sum()
        if self._penalised:
            penalty = kl(logprobs, tokens["reference"], config.kl.estimator)
            total = total + config.kl.coef * _scaled(penalty, scale)
        if config.entropy_coef:
            total = total - config.entropy_coef * _scaled(entropy, scale)
        return Scored(total, sums, weight)


def _scaled(terms: Tensor, scale: Tensor | None) -> Tensor:
    return terms.sum() if scale is None else (terms * scale).sum()
