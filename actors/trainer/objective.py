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
    maxima: dict[str, Tensor]  # scalars, at least 0


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
        first: bool,
    ) -> Scored:
        """The objective on `micro`; `logprobs`, `entropy`, `proximal` float32 [n], `keep` bool [n].

        `proximal` None: the current policy stands in for it, unless the config approximates it. `first`: of the step's
        mini-batches, so that the current policy is that before the step.
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
        ratio = log_ratio(prox, behaviour)
        mismatch = kl(-ratio, torch.zeros_like(ratio), "k3")
        before = proximal if proximal is not None else current if first else None
        engine, largest = _against_engine(before, behaviour, tokens["fresh"])
        counted = weight * loss.ratio if self._loss.coupled else weight
        sums = {
            "clip_fraction": loss.clipped.sum(),
            "dual_clip_fraction": loss.dual_clipped.sum(),
            "ratio_mean": loss.ratio.sum(),
            "prox_kl": kl(anchor, current, "k3").sum(),
            "entropy": entropy.detach().sum(),
            "behaviour_weight_mean": weight.sum(),
            "ess": counted.sum(),
            "ess_squares": counted.square().sum(),
            "masked_fraction": (changed | dropped).sum(),
            "mismatch_kl": mismatch.sum(),
            **engine,
        }
        maxima = {
            "behaviour_weight_max": weight.max(),
            "behaviour_ratio_max": ratio.max().exp(),
            "engine_mismatch_max": largest,
        }
        if "reference" in tokens:
            sums["reference_kl"] = kl(current, tokens["reference"], "k3").sum()
        if self._penalised:
            penalty = kl(logprobs, tokens["reference"], config.kl.estimator)
            total = total + config.kl.coef * _scaled(penalty, scale)
        if config.entropy_coef:
            total = total - config.entropy_coef * _scaled(entropy, scale)
        return Scored(total, sums, maxima)


def _against_engine(before: Tensor | None, behaviour: Tensor, fresh: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Sums over the tokens that the engine made with the weights that the step began with, and the largest |Δ|.

    There the trainer must find the logprob that the engine reported; of any older token they differ rightly. `before`
    [n] are the trainer's, under the weights before the step, None where it has none; `fresh` [n] is 1 for such tokens.
    """
    if before is None:
        none = torch.zeros((), device=fresh.device)
        return {"engine_tokens": none, "engine_mismatch_k1": none, "engine_mismatch_k3": none}, none
    difference = -log_ratio(before, behaviour) * fresh  # of KL(engine ‖ trainer); 0 where nothing can be compared
    sums = {
        "engine_tokens": fresh.sum(),
        "engine_mismatch_k1": difference.sum(),
        "engine_mismatch_k3": kl(difference, torch.zeros_like(difference), "k3").sum(),
    }
    return sums, difference.abs().max()


def _scaled(terms: Tensor, scale: Tensor | None) -> Tensor:
    return terms.sum() if scale is None else (terms * scale).sum()
