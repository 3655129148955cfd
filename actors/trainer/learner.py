"""One training step: samples in, new weights and metrics out. No bus, no files.

advantages by group → seeded split into mini-batches → packed micro-batches → proximal logprobs, once, with the weights
before the step → for each mini-batch: forward, loss / N, backward, clip, AdamW.

On a CPU in float32 the result is a function of the state and of the *set* of samples: bit-identical, whatever their
order (invariant I7).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.trainer import advantages as adv
from actors.trainer import policy_loss
from actors.trainer.config import TrainerConfig
from actors.trainer.corrections import behaviour_weight, log_ratio
from actors.trainer.forward import MicroBatch, ScoredTokens, collate, model_traits, response_logprobs
from actors.trainer.packing import Row, pack, padding_fraction
from actors.trainer.samples import TrainSample

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Micro:
    """A micro-batch with what the loss needs; n = its trained tokens."""

    batch: MicroBatch
    behaviour: Tensor  # float32 [n]
    advantages: Tensor  # float32 [n]


@dataclass(frozen=True, slots=True)
class _MiniBatch:
    denominator: int  # N: trained tokens of all samples, of those without gradient too
    micros: tuple[_Micro, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step, laid out before anything is computed."""

    minibatches: tuple[_MiniBatch, ...]
    metrics: dict[str, float]  # what is known already


class _Tally:
    """Sums over trained tokens and micro-batches. Tensors until the end: one transfer a step, not one a metric."""

    NAMES = (
        *("loss", "clip_fraction", "dual_clip_fraction", "ratio_mean", "prox_kl", "entropy"),
        *("behaviour_weight_mean", "weight_squared", "masked_fraction", "mismatch_kl"),
    )

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(self.NAMES), device=device)
        self.largest_weight = torch.zeros((), device=device)
        self.tokens = 0

    def add(self, *sums: Tensor, weight: Tensor) -> None:
        self.sums += torch.stack(sums)
        self.largest_weight = torch.maximum(self.largest_weight, weight.max())
        self.tokens += len(weight)

    def metrics(self, minibatches: int) -> dict[str, float]:
        values = dict(zip(self.NAMES, self.sums.tolist(), strict=True))
        loss, squared = values.pop("loss"), values.pop("weight_squared")
        total, n = values["behaviour_weight_mean"], max(self.tokens, 1)
        return {name: value / n for name, value in values.items()} | {
            "loss": loss / max(minibatches, 1),
            "ess": total**2 / squared / n if squared else 0.0,
            "behaviour_weight_max": self.largest_weight.item(),
        }


def schedule(step: int, config: TrainerConfig) -> float:
    """The share of `lr` that step `step` uses: linear warm-up, times linear decay to `min_lr_ratio` if asked for."""
    warm_up = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.decay_steps == 0:
        return warm_up
    done = min(1.0, step / config.decay_steps)
    return warm_up * (1.0 - (1.0 - config.min_lr_ratio) * done)


class Learner:
    """A model, its optimizer, and the training step.

    `temperature` is the rollout's: all logprobs are of `softmax(logits / temperature)`. The model is put into eval mode
    for good: with dropout the proximal and the current policy would differ before anything was learned.
    """

    def __init__(self, model: PreTrainedModel, config: TrainerConfig, temperature: float = 1.0) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: only sampled (temperature > 0) rollouts can be trained on")
        self.model: PreTrainedModel = model.train(False)
        self.config = config
        self.temperature = temperature
        self.steps_done = 0
        self._autocast = torch.bfloat16 if config.autocast == "bfloat16" else None
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._hyperparameters: dict[str, Any] = {
            "lr": config.lr,
            "betas": config.betas,
            "eps": config.adam_eps,
            "weight_decay": config.weight_decay,
        }
        self._optimizer = torch.optim.AdamW(self._parameters, **self._hyperparameters, fused=True)

    def step(self, step: int, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Train on `samples` as training step `step` (counted from 0) and return its metrics.

        Raises ValueError if two samples share an id. Means are over the trained tokens of samples with gradient
        (`tokens_with_gradient`), of samples for `reward_*` and `advantage_*`, of optimizer steps for `loss` and
        `grad_norm`. `ess` is the effective sample size (Σw)²/Σw² as a share of the tokens. `mismatch_kl` is k3 of
        KL(behaviour ‖ proximal), `prox_kl` k3 of KL(proximal ‖ current); with loss "ppo", where no proximal policy is
        computed, the current weights stand in for it in the former and the behaviour policy in the latter.
        """
        lr = self.config.lr * schedule(step, self.config)
        for group in self._optimizer.param_groups:
            group["lr"] = lr

        plan = self._plan(step, samples)
        started = perf_counter()
        proximal = self._proximal(plan.minibatches)
        seconds = {"seconds_prox": perf_counter() - started, "seconds_forward": 0.0, "seconds_optimizer": 0.0}

        tally = _Tally(self.model.device)
        norms: list[float] = []
        for minibatch, prox in zip(plan.minibatches, proximal, strict=True):
            started = perf_counter()
            for micro, micro_prox in zip(minibatch.micros, prox, strict=True):
                self._accumulate(micro, micro_prox, minibatch.denominator, tally)
            middle = perf_counter()
            norms.append(self._update(step))
            seconds["seconds_forward"] += middle - started
            seconds["seconds_optimizer"] += perf_counter() - middle

        self.steps_done = step + 1
        finite = [norm for norm in norms if np.isfinite(norm)]
        return (
            plan.metrics
            | tally.metrics(len(norms))
            | seconds
            | {
                "lr": lr,
                "grad_norm": sum(finite) / max(len(finite), 1),
                "optimizer_steps": float(len(finite)),
                "skipped_steps": float(len(norms) - len(finite)),
                "tokens_with_gradient": float(tally.tokens),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on: model, optimizer, steps done, RNG. Tensors are not copied."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.steps_done,
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; training then continues bit-identically, or by another config from there on."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:  # torch takes these from the state too, in silence
            group |= self._hyperparameters
        self.steps_done = state["step"]
        torch.set_rng_state(state["rng"])

    def _plan(self, step: int, samples: Sequence[TrainSample]) -> _Plan:
        ordered = sorted(samples, key=lambda s: (s.group_id, s.sample_id))
        if len({s.sample_id for s in ordered}) != len(ordered):
            raise ValueError(f"step {step}: a sample_id occurs twice; a sample is trained once (invariant I3)")
        config = self.config
        groups = np.array([s.group_id for s in ordered], dtype=np.int64)
        raw = np.array([s.reward for s in ordered], dtype=np.float64)
        rewards, advantages = adv.of_batch(raw, groups, config)

        trained = np.array([int(s.loss_mask.sum()) for s in ordered], dtype=np.int64)
        useful = (advantages != 0) & (trained > 0)  # the others' gradient is 0: they only count in N
        sequences = [ScoredTokens(s.prompt_tokens, s.tokens, s.loss_mask) for s in ordered]
        longest = max((len(s) for s, use in zip(sequences, useful, strict=True) if use), default=0)
        shared = model_traits(self.model).can_share_rows(longest)
        shuffled = np.random.default_rng((config.seed, step)).permutation(len(ordered))
        minibatches: list[_MiniBatch] = []
        packed: list[list[Row]] = []
        for members in np.array_split(shuffled, config.minibatches):
            chosen = [int(i) for i in members if useful[i]]
            lengths = [len(sequences[i]) for i in chosen]
            rows = pack(
                lengths,
                micro_batch_tokens=config.micro_batch_tokens,
                row_tokens=config.row_tokens,
                share_rows=shared,
            )
            if not rows:
                continue  # nothing to learn: a step on zero gradients would only move the weights by momentum
            packed += rows
            micros = tuple(self._micro(r, chosen, ordered, sequences, advantages, shared) for r in rows)
            minibatches.append(_MiniBatch(int(trained[members].sum()), micros))

        return _Plan(
            tuple(minibatches),
            {
                "reward_mean": _mean(raw),
                "reward_std": float(raw.std()) if len(raw) else 0.0,
                "advantage_mean": _mean(advantages),
                "advantage_std": float(advantages.std()) if len(advantages) else 0.0,
                "advantage_abs": _mean(np.abs(advantages)),
                "samples": float(len(ordered)),
                "samples_with_gradient": float(useful.sum()),
                "zero_variance_groups": float(len(np.unique(groups[adv.zero_variance(rewards, groups)]))),
                "tokens_trained": float(trained.sum()),
                "tokens_packed": float(sum(row.tokens for rows in packed for row in rows)),
                "padding_fraction": padding_fraction(packed),
            },
        )

    def _micro(
        self,
        rows: Sequence[Row],
        chosen: Sequence[int],
        samples: Sequence[TrainSample],
        sequences: Sequence[ScoredTokens],
        advantages: adv.Floats,
        shared: bool,
    ) -> _Micro:
        device = self.model.device
        batch = collate(rows, [sequences[i] for i in chosen], shared=shared, device=device)
        order = [chosen[i] for i in batch.sequences]
        behaviour = np.concatenate([samples[i].behaviour_logprobs[samples[i].loss_mask] for i in order])
        per_token = np.repeat(advantages[order], [int(samples[i].loss_mask.sum()) for i in order])
        return _Micro(
            batch,
            torch.from_numpy(behaviour.astype(np.float32)).to(device),
            torch.from_numpy(per_token.astype(np.float32)).to(device),
        )

    def _logprobs(self, batch: MicroBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        return response_logprobs(self.model, batch, self.temperature, entropy=entropy, autocast=self._autocast)

    def _proximal(self, minibatches: Sequence[_MiniBatch]) -> list[list[Tensor | None]]:
        """Logprobs under the weights before this step. None for the first mini-batch: there the current policy *is*
        the proximal one. Naive PPO needs none at all."""
        proximal: list[list[Tensor | None]] = [[None] * len(m.micros) for m in minibatches]
        if self.config.loss == "decoupled_ppo":
            with torch.no_grad():
                proximal[1:] = [[self._logprobs(micro.batch)[0] for micro in m.micros] for m in minibatches[1:]]
        return proximal

    def _accumulate(self, micro: _Micro, proximal: Tensor | None, denominator: int, tally: _Tally) -> None:
        """Forward and backward of one micro-batch; gradients add up over those of the mini-batch."""
        config = self.config
        logprobs, entropy = self._logprobs(micro.batch, entropy=True)
        assert entropy is not None
        current = logprobs.detach()
        prox = current if proximal is None else proximal
        weights = behaviour_weight(
            prox, micro.behaviour, micro.batch.sequence, len(micro.batch.sequences), config.behaviour_weight
        )
        decoupled = config.loss == "decoupled_ppo"
        anchor = prox if decoupled else torch.nan_to_num(micro.behaviour)
        loss = policy_loss.ppo(
            logprobs,
            anchor,
            micro.advantages,
            clip=config.clip,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            weight=weights.weight if decoupled else None,
        )
        total = loss.total / denominator
        total.backward()  # type: ignore[no-untyped-call]

        weight = weights.weight if decoupled else torch.ones_like(current)
        changed = weights.changed if decoupled else torch.zeros_like(weights.changed)
        mismatch = policy_loss.kl(-log_ratio(prox, micro.behaviour), torch.zeros_like(prox), "k3")
        tally.add(
            total.detach(),
            loss.clipped.sum(),
            loss.dual_clipped.sum(),
            loss.ratio.sum(),
            policy_loss.kl(anchor, current, "k3").sum(),
            entropy.sum(),
            weight.sum(),
            weight.square().sum(),
            changed.sum(),
            mismatch.sum(),
            weight=weight,
        )

    def _update(self, step: int) -> float:
        """One optimizer step on the accumulated gradients; returns their global norm before clipping, or skips the
        step, loudly, and returns what was not finite."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        value = float(norm)
        if np.isfinite(value):
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.config.grad_clip, norm)
            self._optimizer.step()
        else:
            log.warning("optimizer_step_skipped", step=step, grad_norm=value, reason="the gradient is not finite")
        self._optimizer.zero_grad(set_to_none=True)
        return value


def _mean(values: adv.Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
