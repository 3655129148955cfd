"""What a run itself writes of its metrics."""

from pydantic import Field

from schemas import Config


class MetricsConfig(Config):
    """Files in the run's folder. `rollstream metrics` writes the same, anywhere and at any time."""

    jsonl: bool = Field(True, description="metrics.jsonl: one line a step, one an evaluation")
    tensorboard: bool = Field(False, description="tensorboard/: event files; needs the extra `tensorboard`")
