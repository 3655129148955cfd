"""One training step: samples in, new weights and metrics out. No bus, no files.

reference and critic are asked → credit by rewards → seeded split into mini-batches → packed micro-batches → proximal
logprobs, once, with the weights before the step → for each mini-batch: forward, loss / N, backward, clip, AdamW.

On a CPU in float32 the result is a function of the state and of the *set* of samples: bit-identical, whatever their
order (invariant I7).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.functions import load_function
from actors.trainer import plan
from actors.trainer.config import TrainerConfig
from actors.trainer.credit import Values, assign
from actors.trainer.critic import Critic
from actors.trainer.forward import MicroBatch, checkpoint_layers, response_logprobs
from actors.trainer.kl import kl
from actors.trainer.lora import attach, check_checkpoint, detach
from actors.trainer.losses import load_loss
from actors.trainer.m2po import second_moment_mask
from actors.trainer.metrics import of_samples
from actors.trainer.objective import Objective
from actors.trainer.optimizer import PolicyOptimizer, WholeOptimizer
from actors.trainer.outline import spread
from actors.trainer.packing import padding_fraction
from actors.trainer.ranks import OneRank, Ranks
from actors.trainer.reference import load_reference
from actors.trainer.samples import TrainSample
from actors.trainer.sections import INITIAL
from actors.trainer.tally import Tally
from bus.adapter import Adapter


class Learner:
    """A model, its optimizer, and the training step; with them the reference and the critic that the config asks for.

    `temperature` and `max_new_tokens` are the rollout's: all logprobs are of `softmax(logits / temperature)`. `base` is
    the folder of the recipe, where functions and models of the user's are looked for; `initial` that of version 0, the
    model itself if it is left out. With several `ranks` each is given its share of a step's samples, and all hold the
    same weights after it. The model is put into eval mode for good: with dropout the proximal and the current
    policy would differ before anything was learned.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        temperature: float = 1.0,
        *,
        max_new_tokens: int | None = None,
        base: Path | None = None,
        initial: Path | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: only sampled (temperature > 0) rollouts can be trained on")
        self.model: PreTrainedModel = model.train(False)
        self.config = config
        self.temperature = temperature
        self.steps_done = 0
        self.ranks: Ranks = ranks or OneRank()
        self._max_new_tokens = max_new_tokens
        self._autocast = torch.bfloat16 if config.autocast == "bfloat16" else None
        self._objective = Objective(load_loss(config.loss, base), config)
        named = config.advantage.function
        self._own_advantages = None if named is None else load_function(named, base)
        if config.lora is None:
            detach(model)
        self._lora = None if config.lora is None else attach(model, config.lora, config.seed)
        self._reference = None
        # Of weights in shards each forward is an act of all ranks, which ask the reference each on its own.
        in_shards = config.backend == "deepspeed" and config.zero.stage == 3
        self._base_is_reference = self._lora is not None and config.reference == INITIAL and not in_shards
        if config.reference is not None and not self._base_is_reference:
            self._reference = load_reference(config.reference, model, base, initial)
        self._critic = None if config.critic is None else Critic(model, config, config.critic, self.ranks)
        self._optimizer = _optimizer(model, config, self.ranks)
        if config.gradient_checkpointing:
            checkpoint_layers(model)

    def step(self, step: int, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Train on `samples`, those of this rank, as training step `step` (counted from 0); returns the metrics of all.

        What each of them is stands in `metrics`. Raises ValueError if two samples share an id.
        """
        rates = {"lr": self._optimizer.schedule(step)}
        if self._critic is not None:
            rates["critic_lr"] = self._critic.optimizer.schedule(step)
        started = self._now()
        minibatches, metrics = self._plan(step, samples)
        planned = self._now()
        proximal = self._proximal(minibatches)
        seconds = {
            "seconds_plan": planned - started,
            "seconds_prox": self._now() - planned,
            "seconds_forward": 0.0,
            "seconds_optimizer": 0.0,
        }

        tally = Tally(self.model.device)
        norms: list[float] = []
        critic_norms: list[float] = []
        for minibatch, prox in zip(minibatches, proximal, strict=True):
            started = self._now()
            keep, first = self._second_moment(minibatch, prox), not norms
            for micro, micro_prox, micro_keep in zip(minibatch.micros, prox, keep, strict=True):
                last = micro is minibatch.micros[-1]
                self._accumulate(step, micro, micro_prox, micro_keep, minibatch.denominator, first, last, tally)
            middle = self._now()
            norms.append(self._optimizer.update(step))
            if self._critic is not None:
                critic_norms.append(self._critic.optimizer.update(step))
            seconds["seconds_forward"] += middle - started
            seconds["seconds_optimizer"] += self._now() - middle

        self.steps_done = step + 1
        return (
            metrics
            | tally.metrics(len(norms), self.ranks)
            | seconds
            | _norms("", norms)
            | (_norms("critic_", critic_norms) if self._critic is not None else {})
            | rates
        )

    def _now(self) -> float:
        """Seconds, when all that was asked of the device is done."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return perf_counter()

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """On rank 0 the policy's weights by name, in `dtype`, tied ones as one tensor; all ranks ask."""
        weights = self._optimizer.weights(dtype)
        return weights if self._lora is None else self._lora.whole(weights)

    def base_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """As `weights`, but without the adapter: those of version 0. Of a learner with `config.lora`."""
        assert self._lora is not None
        return self._lora.base(self._optimizer.weights(dtype))

    def adapter(self, dtype: torch.dtype) -> Adapter:
        """On rank 0 the adapter, in `dtype`, empty elsewhere; all ranks ask. Of a learner with `config.lora`."""
        assert self._lora is not None
        return self._lora.adapter(self._optimizer.weights(dtype, trained=True))

    def save_adapter(self, folder: Path, base: str) -> None:
        """Write the adapter on rank 0 in peft's format, for a base model that is to be found at `base`; all ranks ask.

        Of a learner with `config.lora`.
        """
        assert self._lora is not None
        adapter = self.adapter(torch.float32)
        if self.ranks.rank == 0:
            self._lora.save(adapter, folder, base)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: model, optimizer, critic, steps done, RNG. Whole on rank 0; all ranks ask.

        Of a model with adapters it holds these alone. Tensors are not copied if the model is not in shards.
        """
        critic = {} if self._critic is None else {"critic": self._critic.state_dict()}
        return critic | {
            "model": self._optimizer.model_state(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.steps_done,
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; training then continues bit-identically, or by another config from there on.

        A critic that the state does not know begins with the policy's weights of that moment. Raises `UserError` if
        the state is of another adapter, or of a whole model where this one has an adapter.
        """
        check_checkpoint(self._lora, state["model"])
        self._optimizer.load_model_state(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._critic is not None and "critic" in state:
            self._critic.load_state_dict(state["critic"])
        elif self._critic is not None:
            self._critic.begin(state["model"])
        self.steps_done = state["step"]
        torch.set_rng_state(state["rng"])

    def _plan(self, step: int, samples: Sequence[TrainSample]) -> tuple[list[plan.MiniBatch], dict[str, float]]:
        config, device = self.config, self.model.device
        batch = plan.ordered(step, samples, self.model, config, self.ranks)
        per_token: dict[str, Sequence[plan.Array]] = {
            "behaviour": [s.behaviour_logprobs[mask] for s, mask in zip(batch.samples, batch.masks, strict=True)],
            "fresh": [_made_by(step, s, mask) for s, mask in zip(batch.samples, batch.masks, strict=True)],
        }
        metrics: dict[str, float] = {}
        penalties = values = None
        if config.reference is not None:
            per_token["reference"], _ = plan.ask(batch, self._reference_logprobs, config, device)
            if config.kl.place == "reward":
                of_own = [
                    _kl_of(*pair, config) for pair in zip(per_token["behaviour"], per_token["reference"], strict=True)
                ]
                penalties = spread(of_own, batch.owners, self.ranks, batch.trained)
        if self._critic is not None:
            values = Values(*plan.ask(batch, self._critic.values, config, device))
            per_token["values"] = values.tokens
        credit = assign(
            batch.samples,
            config,
            max_new_tokens=self._max_new_tokens,
            reference_kl=penalties,
            values=values,
            own=self._own_advantages,
        )
        per_token["advantages"] = credit.advantages
        if values is not None:
            per_token["returns"] = credit.returns
            metrics["explained_variance"] = _explained(values.tokens, credit.returns)
        if config.proximal in ("loglinear", "linear"):
            per_token["versions"] = _versions(batch)

        trained = batch.trained > 0
        everywhere = self._critic is not None or self._objective.touches_every_token
        useful = trained & (everywhere | np.array([bool(a.any()) for a in credit.advantages], dtype=np.bool_))
        minibatches, packed = plan.lay_out(
            step, batch, useful, per_token, config, max_new_tokens=self._max_new_tokens, device=device
        )
        return minibatches, metrics | of_samples(batch.samples, credit, useful) | {
            "tokens_trained": float(batch.trained.sum()),
            "tokens_packed": float(sum(row.tokens for rows in packed for row in rows)),
            "padding_fraction": padding_fraction(packed),
        }

    def _logprobs(
        self, batch: MicroBatch, *, model: PreTrainedModel | None = None, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        def call(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
            return response_logprobs(
                model,
                batch,
                self.temperature,
                entropy=entropy,
                entropy_gradient=self.config.entropy_coef > 0,
                autocast=self._autocast,
            )

        return self._optimizer.forward(call) if model is None else call(model)

    def _reference_logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Of the frozen reference; that is the base of our adapter, if there is one and version 0 is meant."""
        if self._lora is None or not self._base_is_reference:
            return self._logprobs(batch, model=self._reference)
        with self._lora.disabled():
            return self._logprobs(batch)

    def _proximal(self, minibatches: Sequence[plan.MiniBatch]) -> list[list[Tensor | None]]:
        """Logprobs under the weights before this step. None for the first mini-batch: there the current policy *is*
        the proximal one. Coupled losses and approximations need none at all, the mask of M2PO needs all."""
        proximal: list[list[Tensor | None]] = [[None] * len(m.micros) for m in minibatches]
        first = 0 if self.config.m2po_threshold is not None else 1
        if first == 0 or self._objective.needs_proximal:
            with torch.no_grad():
                proximal[first:] = [[self._logprobs(micro.batch)[0] for micro in m.micros] for m in minibatches[first:]]
        return proximal

    def _second_moment(self, minibatch: plan.MiniBatch, proximal: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Which tokens M2PO keeps, of each micro-batch; None: all."""
        threshold = self.config.m2po_threshold
        if threshold is None:
            return [None] * len(minibatch.micros)
        behaviour = [micro.tokens["behaviour"] for micro in minibatch.micros if not micro.empty]
        computed = [prox for prox in proximal if prox is not None]
        none = torch.zeros(0, device=self.model.device)
        own = torch.stack([torch.cat([none, *computed]), torch.cat([none, *behaviour])])
        told = [own]
        if self.ranks.count > 1:
            parts = self.ranks.gather(own.cpu().numpy().tobytes())
            told = [torch.from_numpy(np.frombuffer(part, np.float32).reshape(2, -1).copy()) for part in parts]
        prox_of_all, behaviour_of_all = torch.cat(told, dim=1).to(own.device)
        keep = second_moment_mask(prox_of_all, behaviour_of_all, threshold)
        mine = torch.split(keep, [part.shape[1] for part in told])[self.ranks.rank]
        return torch.split(mine, [len(prox) for prox in computed])

    def _accumulate(
        self,
        step: int,
        micro: plan.Micro,
        proximal: Tensor | None,
        keep: Tensor | None,
        denominator: int,
        first: bool,
        last: bool,
        tally: Tally,
    ) -> None:
        """Forward and backward of one micro-batch; gradients add up over those of the mini-batch."""
        logprobs, entropy = self._logprobs(micro.batch, entropy=True)
        assert entropy is not None
        if micro.empty:
            self._optimizer.backward(logprobs.sum() * 0, last)
            if self._critic is not None:
                nothing = torch.cat(self._critic.values(micro.batch)).sum() * 0
                nothing.backward()  # type: ignore[no-untyped-call]
            return
        scored = self._objective(
            logprobs, entropy, micro, proximal=proximal, keep=keep, current_version=step + 1, first=first
        )
        total = scored.total / denominator
        self._optimizer.backward(total, last)
        sums = {"loss": total.detach(), **scored.sums}
        if self._critic is not None:
            tokens = micro.tokens
            loss = self._critic.loss(micro.batch, tokens["values"], tokens["returns"])
            (loss.total / denominator).backward()  # type: ignore[no-untyped-call]
            sums |= {"value_loss": loss.total.detach(), "value_clip_fraction": loss.clipped.sum()}
        tally.add(sums, scored.maxima, len(logprobs))


def _optimizer(model: PreTrainedModel, config: TrainerConfig, ranks: Ranks) -> PolicyOptimizer:
    if config.backend == "torch":
        return WholeOptimizer(model, config, ranks)
    from actors.trainer.zero import ZeroOptimizer

    return ZeroOptimizer(model, config, ranks)


def _norms(prefix: str, norms: Sequence[float]) -> dict[str, float]:
    finite = [norm for norm in norms if np.isfinite(norm)]
    return {
        f"{prefix}grad_norm": sum(finite) / max(len(finite), 1),
        f"{prefix}optimizer_steps": float(len(finite)),
        f"{prefix}skipped_steps": float(len(norms) - len(finite)),
    }


def _kl_of(behaviour: plan.Array, reference: plan.Array, config: TrainerConfig) -> plan.Array:
    """KL(behaviour ‖ reference) per token; 0 where the engine told no number."""
    x, b = torch.from_numpy(behaviour).double(), torch.from_numpy(reference).double()
    return kl(torch.where(x.isfinite(), x, b), b, config.kl.estimator).numpy()


def _versions(batch: plan.Batch) -> list[plan.Array]:
    out = []
    for sample, mask in zip(batch.samples, batch.masks, strict=True):
        if sample.versions is None:
            raise ValueError(f"sample {sample.sample_id}: an approximate proximal policy needs the tokens' versions")
        out.append(sample.versions[mask])
    return out


def _made_by(version: int, sample: TrainSample, mask: plan.Array) -> plan.Array:
    """Which of the trained tokens this policy version made: bool [m]; none if the sample does not tell."""
    if sample.versions is None:
        return np.zeros(int(mask.sum()), dtype=np.bool_)
    made: plan.Array = (sample.versions == version)[mask]
    return made


def _explained(values: Sequence[plan.Array], returns: Sequence[plan.Array]) -> float:
    """The share of the returns' variance that the values explain: 1 is perfect, 0 no better than a constant."""
    v, r = (np.concatenate([np.zeros(0), *arrays]).astype(np.float64) for arrays in (values, returns))
    variance = float(r.var()) if len(r) else 0.0
    return 1.0 - float((r - v).var()) / variance if variance else 0.0
