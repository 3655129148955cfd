"""What the controller may be told."""

from typing import Literal

from pydantic import Field

from schemas.config import Config


class ControllerConfig(Config):
    """Admission, batches and selection."""

    max_staleness: int = Field(
        4, ge=0, le=1024, description="η: a trained token is at most so many versions old; 0 = synchronous"
    )
    batch_groups: int = Field(16, ge=1, le=65536, description="B: groups (prompts) in a training batch")
    group_size: int = Field(8, ge=1, le=4096, description="samples of one prompt")
    on_stale: Literal["mask", "drop", "wait"] = Field(
        "mask",
        description="a token too old for its step: mask the token, drop its sample, or never let it happen by waiting",
    )
    filter: Literal["none", "zero_variance"] = Field(
        "none", description="zero_variance: groups whose rewards are all equal are dropped and refilled at once"
    )
    pace: bool = Field(True, description="admit only as much as the trainer uses, instead of filling up to the bound")
    pace_age: float = Field(
        1.25,
        gt=0,
        le=1024,
        description="mean age of trained tokens, in versions, at which pace aims; more keeps workers busier where "
        "answers are long-tailed or rewards slow",
    )
