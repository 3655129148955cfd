"""An endpoint over a fake policy, and OpenAI's own clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ops.text import HfTokenizer
from tests.actors.endpoint.chat_model import save_tokenizer
from tests.actors.endpoint.serving import Endpoint


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return HfTokenizer(str(path))


@pytest.fixture
async def endpoint(tokenizer: HfTokenizer, request: pytest.FixtureRequest) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(tokenizer, **getattr(request, "param", {}))
    endpoint.port = await endpoint.server.start("127.0.0.1", 0)
    yield endpoint
    for client in endpoint.clients:
        await client.close()
    for session in endpoint.sessions:
        await session.close()
    await endpoint.server.close()
    endpoint.encoding.close()
