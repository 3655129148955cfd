"""The recipe's `evaluation` section."""

from pydantic import Field

from schemas.config import Config


class EvaluationConfig(Config):
    """Evaluation on problems that are never trained on. The first version and the last are always evaluated."""

    count: int = Field(256, ge=0, le=100_000, description="held-out problems; 0 evaluates nothing")
    greedy: bool = Field(True, description="take the likeliest token; false samples as in training")
    every: int = Field(
        0,
        ge=0,
        description="evaluate each version that is a multiple of it, beside the training, in a process of its own; 0: "
        "only the first and the last, before and after the training",
    )
    workers: int = Field(1, ge=0, le=64, description="evaluators started on this machine if `every` is set")
    nice: int = Field(10, ge=0, le=19, description="by how much they give way to other processes; 0: not at all")
    timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="of one evaluation beside the training, after which it is given up"
    )
