"""The recipe's `episode` section."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from actors.episode.endpoint.config import EndpointConfig
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
    held_up_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="how long a call may hold up all other episodes of its worker: then it is interrupted, and its "
        "sample dropped",
    )
    max_turns: int = Field(16, ge=1, le=4096, description="questions to the model in one episode; then it is cut")
    max_tokens: int | None = Field(
        None, ge=2, description="tokens of context and answer of any turn; by default what the model allows"
    )
    samples: Literal["trajectory", "turn"] = Field(
        "trajectory", description="what is trained: turns that go on from each other as one sequence, or each its own"
    )
    agent: str | None = Field(
        None,
        min_length=1,
        description="an agent that speaks OpenAI's API: a function, file.py:function, a script, file.py, or external",
    )
    command: tuple[str, ...] = Field((), description="such an agent as a program, with its arguments")
    endpoint: EndpointConfig = Field(EndpointConfig(), description="how agents reach the model")
    retries: int = Field(1, ge=0, le=10, description="further attempts after the function has failed")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if self.agent is not None and self.command:
            raise ValueError("agent and command are both set => Keep one of them.")
        if (self.agent is not None or self.command) and (self.function != "single" or self.options):
            raise ValueError("function and options are of no use beside an agent => Remove them, or the agent.")
        if self.agent == "external" and self.workers > 1:
            raise ValueError(
                f"workers is {self.workers} with external agents, which know one address => Set workers to 1."
            )
        return self

    @property
    def has_agent(self) -> bool:
        """Whether an agent asks, over HTTP."""
        return self.agent is not None or bool(self.command)

    @property
    def what(self) -> str:
        """What is run for each prompt, by the recipe's word for it."""
        if self.has_agent:
            return f"agent {self.agent or ' '.join(self.command)}"
        return f"function {self.function}"
