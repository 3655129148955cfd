"""What a recipe may say about the trainer and about the warm start. Imports no torch."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from actors.trainer.presets import Algorithm, with_preset
from actors.trainer.sections import (
    AdvantageConfig,
    Beta,
    CorrectionConfig,
    CriticConfig,
    KlConfig,
    KlEstimator,
    Level,
    LoraConfig,
    OverlongConfig,
    PublishConfig,
    ZeroConfig,
)
from schemas.config import Config

__all__ = [
    "AdvantageConfig",
    "CorrectionConfig",
    "CriticConfig",
    "KlConfig",
    "KlEstimator",
    "Level",
    "LoraConfig",
    "OverlongConfig",
    "PublishConfig",
    "SftConfig",
    "TrainerConfig",
    "ZeroConfig",
]

LOSSES = ("decoupled_ppo", "ppo", "gspo", "sapo", "sapo_sequence", "cispo", "reinforce")
COUPLED_LOSSES = frozenset({"ppo", "sapo", "sapo_sequence", "cispo"})  # ratios are taken to the behaviour policy
DUAL_CLIPPED_LOSSES = frozenset({"decoupled_ppo", "ppo", "gspo"})
SEQUENCE_LOSSES = frozenset({"gspo"})  # they take one advantage a sequence

ProximalApproximation = Literal["loglinear", "linear", "rollout"]


def _loss_name(value: str) -> str:
    source, colon, name = value.rpartition(":")
    if value not in LOSSES and not (colon and source and name):
        raise ValueError(
            f"{value!r} is no loss => Use one of {', '.join(LOSSES)}, or one of your own: 'path/to/file.py:function'."
        )
    return value


class TrainerConfig(Config):
    """One trainer. Token counts are prompt + response tokens, padding included.

    `algorithm` names a preset for the keys from `loss` to `critic` (see `presets`); each of them may be given beside
    it, and then counts.
    """

    backend: Literal["torch", "deepspeed"] = "torch"
    zero: ZeroConfig = ZeroConfig()  # of backend deepspeed
    ranks: int = Field(default=1, ge=0, le=4096)  # processes; 0: the run starts no trainer, and waits for yours
    algorithm: Algorithm | None = None
    loss: Annotated[str, AfterValidator(_loss_name)] = "decoupled_ppo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    clip_high: PositiveFloat | None = None  # None: as `clip`; DAPO's clip-higher is 0.28
    dual_clip: float | None = Field(default=None, gt=1)
    sapo_tau: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.05)  # of the gate for A > 0, and for the others
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"  # see `aggregation`
    proximal: Literal["recompute"] | ProximalApproximation = "recompute"  # the others save a forward, see `proximal`
    behaviour_weight: CorrectionConfig = CorrectionConfig()
    opsm_threshold: PositiveFloat | None = None  # DeepSeek-V3.2's is 1e-4; None: no sequence is dropped
    m2po_threshold: PositiveFloat | None = None  # the paper's is 0.04; None: no token is masked
    entropy_coef: float = Field(default=0.0, ge=0)
    kl: KlConfig = KlConfig()
    reference: str | None = Field(default=None, min_length=1)  # "initial" is version 0; else a model folder
    advantage: AdvantageConfig = AdvantageConfig()
    discount: float = Field(default=1.0, gt=0, le=1)  # γ, per trained token
    turn_discount: float | None = Field(default=None, ge=0, le=1)  # γ, per turn (see `turns`); None: credit by token
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    reward_bias: float = 0.0
    reward_scale: float = 1.0
    reward_clip: PositiveFloat | None = None  # of |reward| after bias and scale
    overlong: OverlongConfig | None = None
    unfinished: Literal["train", "mask", "no_reward"] = "train"  # answers that were cut at rollout.max_new_tokens
    critic: CriticConfig | None = None
    lora: LoraConfig | None = None  # train adapters, and publish only these
    minibatches: PositiveInt = 1  # optimizer steps a training step
    lr: PositiveFloat = 1e-5
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    adam_eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)  # training steps of linear warm-up
    decay_steps: int = Field(default=0, ge=0)  # training steps of linear decay to min_lr_ratio · lr; 0: none
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    grad_clip: PositiveFloat = 1.0  # global norm
    micro_batch_tokens: PositiveInt = 8192
    row_tokens: int = Field(default=0, ge=0)  # 0: chosen from the lengths of each batch
    autocast: Literal["none", "bfloat16"] = "none"
    gradient_checkpointing: bool = False  # a layer's activations are computed again for the backward pass, not kept
    threads: PositiveInt = 1  # of the process; the learner itself changes no global setting
    checkpoint_every: PositiveInt = 10  # training steps
    keep_checkpoints: PositiveInt = 2
    keep_every: int = Field(default=0, ge=0)  # checkpoints of its multiples stay for ever; 0: of none
    keep_versions: PositiveInt = 4  # and those that they stand on, and those of the checkpoints
    publish: PublishConfig = PublishConfig()
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, fields: Any) -> Any:
        return with_preset(fields) if isinstance(fields, dict) else fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in self._contradictions():
            raise ValueError(problem)
        if self.row_tokens > self.micro_batch_tokens:
            raise ValueError(
                f"row_tokens {self.row_tokens} exceeds micro_batch_tokens {self.micro_batch_tokens}: "
                "a row must fit into a micro-batch"
            )
        return self

    def _contradictions(self) -> Iterator[str]:
        """Settings that cannot be right together, as `reason => remedy`."""
        if self.kl.coef and self.reference is None:
            yield (
                f"kl.coef {self.kl.coef} without a reference policy: there is nothing to measure the KL to "
                "=> Set reference to initial, or to the folder of a model; or kl.coef to 0."
            )
        if self.lora is not None and self.critic is not None:
            yield (
                "lora with a critic, which trains all weights of a second model: the memory that adapters are there to "
                "save => Take an algorithm without a critic, such as grpo, or leave lora out."
            )
        if self.backend == "torch" and self.zero != ZeroConfig():
            yield "zero is of backend deepspeed => Set backend to deepspeed, or leave zero out."
        if self.keep_every % self.checkpoint_every:
            yield (
                f"keep_every {self.keep_every} with checkpoint_every {self.checkpoint_every}: not all of its multiples "
                "have a checkpoint to keep => Make keep_every a multiple of checkpoint_every."
            )
        if self.dual_clip is not None and self.loss in LOSSES and self.loss not in DUAL_CLIPPED_LOSSES:
            yield (
                f"dual_clip {self.dual_clip} with loss {self.loss}, which has no ratio to clip twice "
                f"=> Remove dual_clip, or use one of {', '.join(sorted(DUAL_CLIPPED_LOSSES))}."
            )
        if self.proximal in ("loglinear", "linear") and self.loss in COUPLED_LOSSES:
            yield (
                f"proximal {self.proximal} with loss {self.loss}, which takes no proximal policy "
                "=> Remove proximal, or use a decoupled loss such as decoupled_ppo."
            )
        if self.m2po_threshold is not None and self.proximal != "recompute":
            yield (
                f"m2po_threshold with proximal {self.proximal}: the mask compares the behaviour policy with the true "
                "proximal one, before the first forward => Set proximal to recompute, or m2po_threshold to null."
            )
        if self.turn_discount is not None:
            yield from self._contradictions_by_turn(self.turn_discount)
        if self.advantage.function is not None and self.critic is not None:
            yield (
                "advantage.function with a critic: the function takes the place of the GAE, and the critic would "
                "never be asked => Remove one of the two."
            )
        if self.advantage.function is not None and self.kl.coef and self.kl.place == "reward":
            yield (
                "advantage.function with kl.place reward: the function takes the place of the rewards of tokens, and "
                "the penalty would be lost => Set kl.place to loss, or let the function see to it."
            )
        if self.advantage.function is not None and self.unfinished == "no_reward":
            yield (
                "advantage.function with unfinished no_reward: the function takes the place of the normalised rewards "
                "=> Set unfinished to mask or train; the function sees each sample's finish."
            )

    def _contradictions_by_turn(self, discount: float) -> Iterator[str]:
        """What has no part in returns of turns."""
        told = f"turn_discount {discount:g}"
        if self.critic is not None or (self.discount, self.gae_lambda) != (1.0, 1.0):
            yield (
                f"{told} with a critic, discount or gae_lambda: returns of turns take the place of the GAE => Remove "
                "turn_discount, or the others; algorithm grpo has none of them."
            )
        if self.advantage.function is not None:
            yield f"{told} with advantage.function, which takes its place => Remove one of the two."
        if self.kl.coef and self.kl.place == "reward":
            yield f"{told} with kl.place reward: the penalty would be lost => Set kl.place to loss."
        if self.loss in SEQUENCE_LOSSES:
            yield (
                f"{told} with loss {self.loss}, which takes the mean advantage of a sequence for all its tokens => "
                "Remove turn_discount, or use a loss of tokens such as decoupled_ppo."
            )


class SftConfig(Config):
    """A supervised warm start: `steps` optimizer steps on batches of about `batch_tokens` padded tokens."""

    steps: PositiveInt = 1500
    batch_tokens: PositiveInt = 1024
    lr: PositiveFloat = 3e-3
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup_steps: int = Field(default=40, ge=0)
    min_lr_ratio: float = Field(default=0.02, ge=0, le=1)  # the linear decay ends here
    grad_clip: PositiveFloat = 1.0
    seed: int = Field(default=0, ge=0)
