"""An endpoint over fake policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai

from actors.episode.encoding import Encoding
from actors.episode.endpoint.config import EndpointConfig
from actors.episode.endpoint.registry import Registry
from actors.episode.endpoint.server import Server
from actors.episode.endpoint.session import Session
from ops.text import HfTokenizer
from tests.actors.endpoint.chat_model import FakePolicy

SECRET = b"0" * 32


class Endpoint:
    """One server; `open` adds a session with a policy of its own."""

    def __init__(self, tokenizer: HfTokenizer, **config: Any) -> None:
        self.tokenizer = tokenizer
        self.encoding = Encoding(tokenizer)
        self.registry = Registry(SECRET)
        self.config = EndpointConfig(**{"wait_s": 0.2} | config)
        self.server = Server(self.registry, self.config, "policy", 1.0, 200)
        self.port = 0
        self.clients: list[Any] = []
        self.sessions: list[Session] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def open(self, say: Callable[[str, int], Any], sample: str = "3-1", pause_s: float = 0.0) -> Session:
        policy = FakePolicy(self.tokenizer, say, pause_s)
        session = Session(self.registry.key_of(sample), sample, policy, self.tokenizer, self.encoding)
        await self.registry.open(session, offered=False)
        self.sessions.append(session)
        return session

    def client(self, session: Session, **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 20} | options
        client = openai.AsyncOpenAI(base_url=self.url, api_key=session.key, **options)
        self.clients.append(client)
        return client
