"""The bodies of requests: what is taken, what is taken and not heeded, and what is refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from actors.episode.endpoint.errors import bad, from_validation
from actors.episode.policy import CHOICES_MAX

STOPS_MAX = 16
MESSAGES_MAX = 10_000
PROMPTS_MAX = 256  # of a completion: each is a turn of its own
ID_CHARS_MAX = 200

B = TypeVar("B", bound="Body")

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "reasoning_effort", "reasoning", "verbosity",
)  # fmt: skip
"""How to sample is the recipe's to say: the trainer must know the distribution. These are taken and not heeded."""
HARMLESS = (
    "metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "parallel_tool_calls", "max_tool_calls", "prediction",
)  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},), "echo": (False,), "suffix": ("",), "modalities": (["text"],), "background": (False,),
    "response_format": ({"type": "text"},), "functions": ([],), "function_call": ("none", "auto"),
    "truncation": ("disabled", "auto"),
}  # fmt: skip
"""Parameters that only say what is so anyway, with the values at which they do."""
REMEDIES = {
    "logit_bias": "it would change the distribution that is trained",
    "response_format": "say in the prompt what form the answer shall have, and let the reward tell",
    "text": "say in the prompt what form the answer shall have, and let the reward tell",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "echo": "put the prompt before the text yourself",
    "best_of": "ask for n and choose yourself",
    "background": "wait for the answer, or stream it",
    "conversation": "use previous_response_id, or send the whole input",
    "prompt": "send the input itself",
}


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop: TypeAlias = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]], BeforeValidator(_texts), Field(max_length=STOPS_MAX)
]
Count: TypeAlias = Annotated[int, Field(strict=True, ge=1)]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]


REWARD_MAX = 1e30  # rewards are stored in 32 bits
Reward: TypeAlias = Annotated[float, Field(allow_inf_nan=False, ge=-REWARD_MAX, le=REWARD_MAX)]


class Function(BaseModel):
    """A tool's name and JSON schema."""

    model_config = ConfigDict(extra="ignore")
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool of the agent's own; those that a server runs are not served."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, fields: Any) -> Any:
        """The responses API has the function's fields beside the type."""
        if isinstance(fields, dict) and fields.get("type") == "function" and "function" not in fields:
            return {"type": "function", "function": {name: value for name, value in fields.items() if name != "type"}}
        return fields

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = ConfigDict(extra="ignore")
    include_usage: Flag = False


class Body(BaseModel):
    """What all endpoints take. Unknown parameters are refused, so that nobody believes in one that does nothing."""

    model_config = ConfigDict(extra="allow")
    IGNORED: ClassVar[tuple[str, ...]] = SAMPLING
    model: str = Field("", max_length=1000)
    stream: Flag = False
    n: int = Field(1, strict=True, ge=1, le=CHOICES_MAX)
    stop: Stop = []

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        """A null is as good as nothing."""
        return {name: value for name, value in fields.items() if value is not None}

    @model_validator(mode="after")
    def _nothing_else(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in self.IGNORED or name in HARMLESS or value in NEUTRAL.get(name, ()):
                continue
            what = REMEDIES.get(name, "leave it out")
            raise ValueError(f"The parameter {name[:ID_CHARS_MAX]} with this value is not supported: {what}.")
        return self

    @property
    def max_tokens_asked(self) -> int | None:
        """The most tokens to make."""
        return None

    def unheeded(self, temperature: float) -> list[str]:
        """Parameters that ask for another sampling than the recipe's."""
        same = {
            "temperature": (temperature,), "top_p": (1, 1.0), "top_k": (-1, 0), "min_p": (0,), "presence_penalty": (0,),
            "frequency_penalty": (0,), "repetition_penalty": (1,),
        }  # fmt: skip
        given = self.model_extra or {}
        return [name for name in self.IGNORED if name in given and given[name] not in same.get(name, ())]


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MESSAGES_MAX)
    stream_options: StreamOptions = StreamOptions()
    logprobs: Flag = False
    top_logprobs: int = Field(0, strict=True, ge=0, le=20)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    tools: list[Tool] = Field([], max_length=512)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def max_tokens_asked(self) -> int | None:
        """The newer name holds."""
        return self.max_completion_tokens or self.max_tokens

    def unheeded(self, temperature: float) -> list[str]:
        """Beside the sampling: a call cannot be forced without changing what is sampled."""
        forced = self.tool_choice not in ("none", "auto")
        return super().unheeded(temperature) + (["tool_choice"] if forced else [])


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[Annotated[int, Field(strict=True)]] | list[list[Annotated[int, Field(strict=True)]]]
    stream_options: StreamOptions = StreamOptions()
    logprobs: int | None = Field(None, ge=0, le=20)
    max_tokens: Count | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _best(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError(f"The parameter best_of is not supported: {REMEDIES['best_of']}.")
        if self.prompt in ([], [[]]):
            raise ValueError("prompt: it must hold a text or token ids")
        if len(self.prompts) > PROMPTS_MAX:
            raise ValueError(f"prompt: it must hold at most {PROMPTS_MAX} prompts: send the others in another request")
        return self

    @property
    def max_tokens_asked(self) -> int | None:
        """The most tokens to make."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt):
            return [[item for item in self.prompt if isinstance(item, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]


class Format(BaseModel):
    """The form of a text."""

    model_config = ConfigDict(extra="allow")
    type: str = "text"


class TextOptions(BaseModel):
    """Of the responses API."""

    model_config = ConfigDict(extra="ignore")
    format: Format = Format()


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MESSAGES_MAX)] = ""
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=ID_CHARS_MAX)
    max_output_tokens: Count | None = None
    include: list[str] = []
    top_logprobs: int = Field(0, strict=True, ge=0, le=20)
    tools: list[Tool] = Field([], max_length=512)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    text: TextOptions = TextOptions()
    stream_options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _plain_text(self) -> Self:
        if self.text.format.type != "text":
            raise ValueError(f"The parameter text.format is not supported: {REMEDIES['text']}.")
        if self.n != 1:
            raise ValueError("The parameter n is not one of this endpoint: leave it out.")
        return self

    @property
    def max_tokens_asked(self) -> int | None:
        """The most tokens to make."""
        return self.max_output_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer shall tell them."""
        return "message.output_text.logprobs" in self.include or self.top_logprobs > 0

    def unheeded(self, temperature: float) -> list[str]:
        """As for chat completions."""
        forced = self.tool_choice not in ("none", "auto")
        return super().unheeded(temperature) + (["tool_choice"] if forced else [])


class RewardBody(BaseModel):
    """`POST /v1/rewards`: for one answer by its id (and choice), or for the whole session."""

    model_config = ConfigDict(extra="forbid")
    reward: Reward
    response_id: str | None = Field(None, max_length=ID_CHARS_MAX)
    choice: int = Field(0, ge=0, lt=1 << 20)


class EndBody(BaseModel):
    """`POST /v1/sessions/{id}/end`."""

    model_config = ConfigDict(extra="forbid")
    reward: Reward | None = None
    drop: str | None = Field(None, max_length=1000)


def read_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises `ApiError`."""
    try:
        value = json.loads(raw, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair has no bytes, and no tokens
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise bad(f"The body is no JSON that can be read: {reason}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad("The body must be a JSON object.", code="invalid_json")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def read_body(kind: type[B], raw: bytes) -> B:
    """The request in a body. Raises `ApiError`."""
    return read_model(kind, read_json(raw))


M = TypeVar("M", bound=BaseModel)


def read_model(kind: type[M], fields: dict[str, Any]) -> M:
    """The fields as a model. Raises `ApiError`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None
