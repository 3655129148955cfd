"""What a recipe may say about the trainer and about the warm start. Imports no torch."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from schemas.config import Config

Level = Literal["none", "batch", "group"]


class CorrectionConfig(Config):
    """How the behaviour weight ρ = exp(proximal − behaviour) is kept in bounds (see `corrections`).

    Without bounds the raw weight is used. Presets: TIS = token clamp; MIS = sequence mask; IcePop = token mask with
    lower 0.5 and upper 5.
    """

    level: Literal["token", "sequence"] = "token"
    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    aggregate: Literal["sum", "mean", "max"] = "mean"  # over the tokens of a sequence; level "token" ignores it
    action: Literal["mask", "clamp"] = "mask"
    lower: float | None = None
    upper: float | None = 5.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.action == "clamp" and self.metric != "ratio":
            raise ValueError(
                f"action 'clamp' bounds the weight itself, which metric {self.metric!r} does not measure: "
                "use metric 'ratio', or action 'mask'"
            )
        if self.lower is not None and self.upper is not None and self.lower >= self.upper:
            raise ValueError(f"lower {self.lower} is not below upper {self.upper}: nothing would be in bounds")
        return self


class AdvantageConfig(Config):
    """How rewards become advantages (see `advantages.normalise`). The default is GRPO.

    Presets (mean / std): GRPO group / group, Dr.GRPO group / none, LitePPO group / batch, RLOO group / none with
    leave_one_out, REINFORCE++ batch / batch.
    """

    mean: Level = "group"
    std: Level = "group"
    leave_one_out: bool = False
    eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.leave_one_out and self.mean == "none":
            raise ValueError("leave_one_out needs a mean to leave a sample out of: set mean to 'group' or 'batch'")
        return self


class TrainerConfig(Config):
    """One trainer. Token counts are prompt + response tokens, padding included."""

    backend: Literal["torch"] = "torch"
    loss: Literal["decoupled_ppo", "ppo"] = "decoupled_ppo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    clip_high: PositiveFloat | None = None  # None: as `clip`; DAPO's clip-higher is 0.28
    dual_clip: float | None = Field(default=None, gt=1)
    behaviour_weight: CorrectionConfig = CorrectionConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    reward_bias: float = 0.0
    reward_scale: float = 1.0
    reward_clip: PositiveFloat | None = None  # of |reward| after bias and scale
    minibatches: PositiveInt = 1  # optimizer steps a training step
    lr: PositiveFloat = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)  # training steps of linear warm-up
    decay_steps: int = Field(default=0, ge=0)  # training steps of linear decay to min_lr_ratio · lr; 0: none
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    grad_clip: PositiveFloat = 1.0  # global norm
    micro_batch_tokens: PositiveInt = 8192
    row_tokens: int = Field(default=0, ge=0)  # 0: chosen from the lengths of each batch
    autocast: Literal["none", "bfloat16"] = "none"
    threads: PositiveInt = 1  # of the process; the learner itself changes no global setting
    checkpoint_every: PositiveInt = 10  # training steps
    keep_checkpoints: PositiveInt = 2
    keep_versions: PositiveInt = 4
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.row_tokens > self.micro_batch_tokens:
            raise ValueError(
                f"row_tokens {self.row_tokens} exceeds micro_batch_tokens {self.micro_batch_tokens}: "
                "a row must fit into a micro-batch"
            )
        return self


class SftConfig(Config):
    """A supervised warm start: `steps` optimizer steps on batches of about `batch_tokens` padded tokens."""

    steps: PositiveInt = 1500
    batch_tokens: PositiveInt = 1024
    lr: PositiveFloat = 3e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup_steps: int = Field(default=40, ge=0)
    min_lr_ratio: float = Field(default=0.02, ge=0, le=1)  # the linear decay ends here
    grad_clip: PositiveFloat = 1.0
    seed: int = Field(default=0, ge=0)
