"""How a rollout worker generates. Imports no torch, so that recipes can be checked without it."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from schemas.config import Config


class VllmConfig(Config):
    """The `rollout.vllm` section: what only the engine `vllm` reads."""

    tensor_parallel: int = Field(1, ge=1, le=64, description="devices that one engine's model is split over")
    gpu_memory_utilization: float = Field(0.9, gt=0.0, le=1.0, description="of a GPU's memory; a CPU ignores it")
    kv_cache_gib: float | None = Field(
        None, gt=0.0, description="of the KV cache; by default what a GPU has left, and 1 on a CPU"
    )
    max_model_len: int | None = Field(None, ge=2, description="tokens of prompt and answer; by default the model's")
    enforce_eager: bool | None = Field(None, description="compile nothing; by default so on a CPU only")
    stalled_after_s: float = Field(
        120.0, gt=0.0, description="seconds without a token, while samples run, after which an engine counts as dead"
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="more arguments of vLLM's AsyncEngineArgs, by name; they overrule ours"
    )


class Repetition(Config):
    """An answer that ends in the same few tokens over and over is hopeless."""

    period: int = Field(32, ge=1, le=1024, description="tokens of the unit that is repeated, at most")
    times: int = Field(4, ge=2, le=1024, description="how often it stands there, at least")
    tokens: int = Field(64, ge=4, description="how long all repetitions are together, at least")


class Budget(Config):
    """An answer that has not written `marker` when only `reserve` tokens are left can no longer finish."""

    marker: str = Field(min_length=1, description="what stands before the final answer, such as </think>")
    reserve: int = Field(ge=1, description="tokens that the final answer takes, at least")


class StopEarly(Config):
    """Which unfinished answers are given up as hopeless. It biases the data: see docs/recipes.md."""

    every: int = Field(32, ge=1, description="tokens between two looks at an answer; it is cut at a multiple of this")
    repetition: Repetition | None = Field(None, description="loops; {} takes the defaults")
    budget: Budget | None = Field(None, description="answers that are too late to finish")
    predicate: str | None = Field(None, description="a function of the text so far that returns True if it is hopeless")


class RolloutConfig(Config):
    """The `rollout` section of a recipe. `pydantic.ValidationError` names the field and the bound that it breaks."""

    engine: Literal["torch", "vllm"] = Field(
        "torch", description="what decodes: the built-in engine over transformers, or vLLM, which is installed apart"
    )
    workers: int = Field(1, ge=1, le=1024, description="rollout processes started on this machine")
    slots: int = Field(64, ge=1, le=4096, description="sequences decoded together by one worker")
    max_new_tokens: int = Field(256, ge=1, description="tokens after which an answer is cut (finish = length)")
    temperature: float = Field(
        1.0, gt=0.0, le=10.0, description="logits are divided by it; 1 samples the policy itself"
    )
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="keep the likeliest tokens up to this mass; 1 keeps all")
    top_k: int = Field(0, ge=0, description="keep this many of the likeliest tokens; 0 keeps all")
    stop: tuple[str, ...] = Field(
        (), description="tokens, as the tokenizer spells them, that end an answer besides eos"
    )
    on_update: Literal["recompute", "keep", "drain"] = Field(
        "recompute",
        description="new weights: interrupt and rebuild the KV cache, interrupt and keep it, or finish first",
    )
    partial_every: int = Field(
        0, ge=0, description="tokens between two published prefixes of a running sample; 0 publishes at hand-over only"
    )
    stop_early: StopEarly | None = Field(None, description="give hopeless answers up; finish is length, as if cut")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights and of the KV cache")
    threads: int = Field(1, ge=1, le=1024, description="torch threads of one worker process")
    prefill_tokens: int = Field(
        2048, ge=1, description="padded tokens of one prefill forward; a longer prompt takes several"
    )
    prompt_cache_mib: int = Field(
        256,
        ge=0,
        le=1 << 20,
        description="of keys and values of prompts, for the rest of their groups, until the next weights; 0 keeps none",
    )
    deterministic: bool = Field(
        False,
        description="a sample's tokens and logprobs are the same bits whatever is decoded beside it, at about twice "
        "the time of decoding (1.7 to 2.3 times on the running total); needs threads 1",
    )

    vllm: VllmConfig = Field(VllmConfig(), description="what only the engine vllm reads")

    @model_validator(mode="after")
    def _check(self) -> Self:
        budget = self.stop_early.budget if self.stop_early else None
        if budget is not None and budget.reserve >= self.max_new_tokens:
            raise ValueError(
                f"stop_early.budget.reserve {budget.reserve} of max_new_tokens {self.max_new_tokens}: every answer "
                "would be given up => Lower the reserve, or raise max_new_tokens."
            )
        if self.deterministic and self.engine != "torch":
            raise ValueError(
                f"deterministic is true, but the engine is {self.engine}: only the built-in one can promise that => "
                "Set engine to torch, or deterministic to false."
            )
        if self.deterministic and self.threads > 1:
            raise ValueError(
                f"deterministic is true, but threads is {self.threads}: threads share out the rows of a batch, and "
                "where a row lies would change its last bits => Set threads to 1, or deterministic to false."
            )
        return self
