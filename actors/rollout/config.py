"""How a rollout worker generates. Imports no torch, so that recipes can be checked without it."""

from typing import Literal, Self

from pydantic import Field, model_validator

from schemas.config import Config


class RolloutConfig(Config):
    """The `rollout` section of a recipe. `pydantic.ValidationError` names the field and the bound that it breaks."""

    engine: Literal["torch"] = Field("torch", description="what decodes: the built-in engine over transformers")
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
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights and of the KV cache")
    threads: int = Field(1, ge=1, le=1024, description="torch threads of one worker process")
    prefill_tokens: int = Field(
        2048, ge=1, description="padded tokens of one prefill forward; a longer single prompt is a forward of its own"
    )
    deterministic: bool = Field(
        False,
        description="a sample's tokens and logprobs are the same bits whatever is decoded beside it, at about twice "
        "the time of decoding (1.7 to 2.3 times on the running total); needs threads 1",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.deterministic and self.threads > 1:
            raise ValueError(
                f"deterministic is true, but threads is {self.threads}: threads share out the rows of a batch, and "
                "where a row lies would change its last bits => Set threads to 1, or deterministic to false."
            )
        return self
