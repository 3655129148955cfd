"""The speeds of a cluster's parts, as the model takes them."""

from __future__ import annotations

from pydantic import Field

from schemas.config import Config


class Speeds(Config):
    """Seconds are of one engine (a device, or a group of `engine_devices` that share a model), unless said otherwise.

    A decode step of b sequences with c tokens in their caches takes
    `decode_base_s + b * decode_row_s + c * decode_context_s`.
    """

    engine_devices: int = Field(1, ge=1, le=1024, description="devices that hold one copy of the model together")
    slots: int = Field(ge=1, le=65536, description="sequences decoded together by one engine")
    decode_base_s: float = Field(gt=0, description="of a step: reading the weights, launching, sampling")
    decode_row_s: float = Field(ge=0, description="of a step, for each sequence")
    decode_context_s: float = Field(ge=0, description="of a step, for each token in the caches")
    prefill_token_s: float = Field(ge=0, description="for each token of a prompt, or of a sequence that is rebuilt")
    load_s: float = Field(ge=0, description="an engine stands still while it takes new weights")
    publish_s: float = Field(ge=0, description="the trainer writes the weights of a version")
    train_token_s: float = Field(gt=0, description="device-seconds a trained token, prompts included")
    train_step_s: float = Field(ge=0, description="of each training step, whatever the batch")
    train_loss: float = Field(
        0.0, ge=0, lt=1, description="share of a trainer's speed lost at each doubling of its devices"
    )
    reshard_s: float = Field(
        0.0, ge=0, description="synchronous on all devices: turning from training to generating and back, a step"
    )
    reward_s: float = Field(0.0, ge=0, description="a reward takes so long in the mean")
    reward_sigma: float = Field(0.0, ge=0, le=3, description="spread of the logarithm of that time")
    reward_parallel: int = Field(1024, ge=1, description="rewards computed at the same time, in the whole cluster")

    def train_s(self, tokens: float, devices: int) -> float:
        """Seconds of a training step on so many devices, without publishing."""
        doublings = max(0, devices - 1).bit_length()
        speed = devices * (1.0 - self.train_loss) ** doublings
        return self.train_step_s + tokens * self.train_token_s / speed
