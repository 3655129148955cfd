"""The sections within `trainer`: how rewards, advantages, corrections, KL and critic are told. Imports no torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from schemas.config import Config

Level = Literal["none", "batch", "group"]
Beta = Annotated[float, Field(ge=0, lt=1)]  # how much AdamW keeps of a moment; torch refuses others
INITIAL = "initial"  # as `trainer.reference`: version 0
KlEstimator = Literal["k1", "k2", "k3"]


def _function_path(value: str) -> str:
    source, colon, name = value.rpartition(":")
    if not colon or not source or not name:
        raise ValueError(
            f"{value!r} names no function => Write 'path/to/file.py:function', relative to the recipe, or "
            "'package.module:function'."
        )
    return value


FunctionPath = Annotated[str, AfterValidator(_function_path)]

# Corrections by the field's names; each is shorthand for the keys of `CorrectionConfig`.
CORRECTIONS: dict[str, dict[str, Any]] = {
    "tis": {"level": "token", "action": "clamp", "upper": 2.0},
    "icepop": {"level": "token", "action": "mask", "lower": 0.5, "upper": 5.0},
    "mis": {"level": "sequence", "aggregate": "sum", "action": "mask", "upper": 5.0},
    "geometric": {"level": "sequence", "aggregate": "mean", "action": "mask", "lower": 0.5, "upper": 2.0},
}


class CorrectionConfig(Config):
    """How the behaviour weight ρ = exp(proximal − behaviour) is kept in bounds (see `corrections`).

    Without bounds the raw weight is used. By name (`behaviour_weight: tis`): `tis` clamps tokens, `icepop` masks tokens
    outside [0.5, 5], `mis` masks sequences by the product of their ratios, `geometric` by their geometric mean.
    """

    level: Literal["token", "sequence"] = "token"
    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    aggregate: Literal["sum", "mean", "max"] = "mean"  # over the tokens of a sequence; level "token" ignores it
    action: Literal["mask", "clamp"] = "mask"
    lower: float | None = None
    upper: float | None = 5.0

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in CORRECTIONS:
            raise ValueError(
                f"{value!r} is no correction => Use one of {', '.join(CORRECTIONS)}, or the keys level, metric, "
                "aggregate, action, lower and upper."
            )
        return CORRECTIONS[value]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.action == "clamp" and self.metric != "ratio":
            raise ValueError(
                f"action 'clamp' bounds the weight itself, which metric {self.metric!r} does not measure: "
                "use metric 'ratio', or action 'mask'"
            )
        if self.lower is not None and self.upper is not None and self.lower >= self.upper:
            raise ValueError(f"lower {self.lower} is not below upper {self.upper}: nothing would be in bounds")
        if self.upper is not None and self.upper <= 0 and self.metric != "k1":
            raise ValueError(
                f"upper {self.upper} with metric {self.metric!r}, which is never below 0: nothing would be in bounds "
                "=> Set upper above 0, or to null for no bound."
            )
        return self


class AdvantageConfig(Config):
    """How rewards become advantages (see `advantages.normalise` and `credit`). The default is GRPO.

    `mean` and `std` normalise the rewards of samples: GRPO group / group, Dr.GRPO group / none, LitePPO group / batch,
    RLOO group / none with leave_one_out. `token_mean` and `token_std` normalise the advantages of tokens, behind the
    GAE: PPO and REINFORCE++ batch / batch, with none / none for the rewards.
    """

    mean: Level = "group"
    std: Level = "group"
    leave_one_out: bool = False
    eps: PositiveFloat = 1e-5
    token_mean: Level = "none"
    token_std: Level = "none"
    function: FunctionPath | None = None  # one of the user's own, instead of all that is above and of the GAE

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.leave_one_out and self.mean == "none":
            raise ValueError("leave_one_out needs a mean to leave a sample out of: set mean to 'group' or 'batch'")
        return self


class KlConfig(Config):
    """The penalty on moving away from `trainer.reference`: `coef` times KL, per token."""

    coef: float = Field(default=0.0, ge=0)
    estimator: KlEstimator = "k3"
    place: Literal["loss", "reward"] = "loss"  # reward: KL(behaviour ‖ reference), and the GAE carries it on

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.coef and self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "k1 in the loss has the gradient of the log-probability, whatever the reference says: it holds "
                "nothing back => Set estimator to k2 or k3, or place to reward."
            )
        return self


class OverlongConfig(Config):
    """DAPO's soft penalty on answers near `rollout.max_new_tokens`: from 0, `tail` before it, to `factor` at it."""

    tail: float = Field(default=0.2, gt=0, le=1)  # as a share of rollout.max_new_tokens
    factor: PositiveFloat = 1.0


class CriticConfig(Config):
    """A value model: the policy's architecture with a head of one number, its own weights and its own optimizer.

    What is not named here (betas, weight_decay, grad_clip, the schedule of the learning rate) is the trainer's.
    """

    lr: PositiveFloat | None = None  # None: the trainer's
    loss: Literal["mse", "huber"] = "mse"
    clip: PositiveFloat | None = 0.5  # how far a value may move from that before the step; None clips nothing
    huber_delta: PositiveFloat = 10.0


class ZeroConfig(Config):
    """DeepSpeed's ZeRO: what lies in shards over the ranks, and where.

    Stage 1 shards the optimizer's state, 2 the gradients too, 3 the weights too. `settings` are further keys of
    DeepSpeed's own `zero_optimization`, such as `stage3_param_persistence_threshold`.
    """

    stage: Literal[1, 2, 3] = 2
    bfloat16: bool = False  # weights and gradients; the optimizer's own weights stay float32
    offload_optimizer: bool = False  # into the memory of the host
    offload_weights: bool = False  # the same, of stage 3
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.offload_weights and self.stage != 3:
            raise ValueError(f"offload_weights needs stage 3, where weights lie in shards; stage is {self.stage}")
        return self


ALL_LINEAR = "all-linear"
LORA_REMEDY = "pip install 'rollstream[lora]', or leave trainer.lora out."  # where peft is not installed


def _no_dropout(value: float) -> float:
    if value:
        raise ValueError(
            f"dropout {value}: the proximal and the current policy would differ before anything was learned, and "
            "engines, which know no dropout, would sample from another policy than is trained => Set dropout to 0."
        )
    return value


class LoraConfig(Config):
    """Low-rank adapters, trained in place of the model's weights: W = W₀ + s·B·A, with A [rank, in] and B [out, rank].

    s = alpha / rank, or alpha / √rank with `rslora`. `targets` are linear layers by name, or by the end of it:
    `q_proj`, `[q_proj, v_proj]`, `layers.0.mlp.up_proj`; all-linear means all of them but the output head.
    """

    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    rslora: bool = False
    dropout: Annotated[float, AfterValidator(_no_dropout)] = Field(default=0.0, ge=0, lt=1)
    targets: Annotated[
        tuple[str, ...], Field(min_length=1), BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)
    ] = (ALL_LINEAR,)

    @property
    def scale(self) -> float:
        """s."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class PublishConfig(Config):
    """How new weights go to their readers, in the dtype that rollout workers hold.

    A version is what changed since the one before (see `bus.weights.delta`), but every `full_every`-th is full, and so
    is one of which too much changed. With `overlap` a version is encoded and announced while the next step is trained.
    """

    delta: bool = True
    full_every: PositiveInt = 10
    overlap: bool = True
