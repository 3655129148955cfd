"""The recipe's `episode` section."""

from typing import Any, Literal

from pydantic import Field

from schemas.config import Config


class EpisodeConfig(Config):
    """How prompts become rollouts in several turns. Without the section each prompt is answered once."""

    function: str = Field(
        "single",
        min_length=1,
        description="single, multi_turn or tool, or an async function of yours, file.py:function",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="the built-in's options, or keyword arguments of your function"
    )
    workers: int = Field(1, ge=0, le=1024, description="episode processes started on this machine")
    at_once: int = Field(128, ge=1, le=65_536, description="episodes that one worker runs at a time")
    timeout_s: float = Field(600.0, gt=0, le=86_400, description="of one episode, waiting for the model included")
    max_turns: int = Field(16, ge=1, le=4096, description="questions to the model in one episode; then it is cut")
    max_tokens: int | None = Field(
        None, ge=2, description="tokens of context and answer of any turn; by default what the model allows"
    )
    samples: Literal["trajectory", "turn"] = Field(
        "trajectory", description="what is trained: turns that go on from each other as one sequence, or each its own"
    )
    retries: int = Field(1, ge=0, le=10, description="further attempts after the function has failed")
