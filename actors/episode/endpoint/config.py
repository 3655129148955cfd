"""The recipe's `episode.endpoint` section."""

import ipaddress
from typing import Literal, Self

from pydantic import Field, model_validator

from schemas.config import Config

TOKEN_BYTES_MIN = 16


class EndpointConfig(Config):
    """How agents reach the model. Read only where `episode.agent` or `episode.command` is set."""

    host: str = Field(
        "127.0.0.1", min_length=1, description="address to listen on; another than loopback needs a token"
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="of the first episode worker, the others follow; 0 takes free ones and keeps them",
    )
    token_env: str = Field(
        "ROLLSTREAM_AGENT_TOKEN",
        pattern=r"^[A-Za-z_]\w*$",
        description="environment variable with the token that external agents show to get a session",
    )
    task_fields: tuple[str, ...] = Field(
        (), description="fields of the data row that an agent is given beside the prompt; never the answer by itself"
    )
    requests_max: int = Field(256, ge=1, le=65_536, description="requests in flight; more wait, then get a 429")
    wait_s: float = Field(
        20.0, ge=0, le=600, description="how long a request waits for room, or for its session after a restart"
    )
    idle_s: float = Field(300.0, gt=0, le=86_400, description="silence after which an external agent's session ends")
    on_idle: Literal["drop", "score"] = Field(
        "drop", description="what becomes of a session that ended by silence: dropped, or scored as it is"
    )
    body_mib_max: int = Field(
        2, ge=1, le=64, description="size of a request's body; reading a MiB can hold up the worker for 0.4 s"
    )

    @model_validator(mode="after")
    def _ports(self) -> Self:
        if self.port and self.port + 1024 > 65535:
            raise ValueError(f"port is {self.port} => Leave room for the ports of more workers: at most 64511.")
        return self

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
