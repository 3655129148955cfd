"""One vLLM for many tests: it takes half a minute to start. Each test gets an engine of its own over it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from actors.rollout import vllm_versions
from actors.rollout.config import RolloutConfig
from actors.rollout.engine import Generation, Request, Sampling
from actors.rollout.vllm_engine import VllmEngine

VOCAB, CONTEXT, SLOTS = 70, 1024, 8
STOP = 1


def make_model(seed: int = 0) -> PreTrainedModel:
    """The same seed gives the same float32 weights. Tied, as most small models are, which is where loading can lie."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}
    rest = {"max_position_embeddings": CONTEXT, "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": STOP}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **rest)).eval()


class Served:
    """The model folder, weights of other seeds, and the `AsyncLLM` that all tests share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        make_model().save_pretrained(self.model)
        self.llm: Any = None

    def start(self, model: Path, config: RolloutConfig) -> Any:
        """As `vllm_versions.start`, once."""
        if self.llm is None:
            self.llm = vllm_versions.start(model, config)
            self.shutdown = self.llm.shutdown
            self.llm.shutdown = lambda timeout=None: None
        return self.llm

    def weights(self, seed: int) -> Path:
        """The weights of `make_model(seed)` in a file."""
        path = self.folder / f"{seed}.safetensors"
        if not path.exists():
            state = make_model(seed).state_dict()
            del state["lm_head.weight"]
            save_file(state, path)
        return path

    @asynccontextmanager
    async def engine(self, **config: Any) -> AsyncIterator[VllmEngine]:
        """An engine that holds version 0, with an empty cache."""
        engine = VllmEngine(self.model, RolloutConfig(engine="vllm", **{"slots": SLOTS, **config}), -1, self.start)
        await engine.start()
        await engine.update(0, self.weights(0))
        assert await self.llm.reset_prefix_cache()
        try:
            yield engine
        finally:
            await engine.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"))
    yield served
    if served.llm is not None:
        served.shutdown(5.0)


def request(name: str = "r", new: int = 60, seed: int = 1, length: int = 4, **sampling: Any) -> Request:
    return Request(name, tuple(range(5, 5 + length)), Sampling(new, **sampling), seed)


def batch(count: int, new: int = 60, **sampling: Any) -> list[Request]:
    return [request(f"r{i}", new, seed=i, length=3 + i % 4, **sampling) for i in range(count)]


def launch(engine: VllmEngine, requests: list[Request]) -> list[asyncio.Task[Generation]]:
    return [asyncio.create_task(engine.generate(one)) for one in requests]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def grown(engine: VllmEngine, tokens: int, count: int = 1) -> Callable[[], bool]:
    return lambda: sum(length >= tokens for length in engine.lengths().values()) >= count


def runs(generation: Generation) -> list[tuple[int, int]]:
    """Segments from the version of each token, to hold them against."""
    each = [version for version, count in generation.segments for _ in range(count)]
    return [(version, len(list(group))) for version, group in itertools.groupby(each)]
