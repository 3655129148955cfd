"""An adapter is merged into stacked, padded parameters of somebody else's model: the tokens tell whether rightly."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from actors.rollout.engine import WeightsError
from bus.adapter import A, Adapter, AdapterShape, B
from tests.actors.tiny_model import segment_logprobs
from tests.vllm.served import Served, batch, grown, launch, make_model, until

TOLERANCE = 1e-4
TARGETS = tuple(f"model.layers.{layer}.{part}" for layer in (0, 1) for part in ("mlp.up_proj", "self_attn.v_proj"))


def make_adapter(seed: int, targets: tuple[str, ...] = TARGETS) -> Adapter:
    state, rank = make_model().state_dict(), 2
    torch.manual_seed(seed)
    tensors = {}
    for target in targets:
        rows, columns = state[f"{target}.weight"].shape
        tensors[target + A] = torch.randn(rank, columns) * 0.2
        tensors[target + B] = torch.randn(rows, rank) * 0.2
    return Adapter(tensors, AdapterShape(rank, 4.0, 2.0, tuple(sorted(targets))))


def saved(adapter: Adapter, path: Path) -> Path:
    save_file(dict(adapter), path, metadata={"rollstream": json.dumps({"adapter": adapter.describe()})})
    return path


def with_adapter(adapter: Adapter, base: int = 0) -> PreTrainedModel:
    model = make_model(base)
    model.load_state_dict(adapter.over(model.state_dict()))
    return model


async def test_samples_go_from_adapter_to_adapter_and_back_to_whole_weights(served: Served, tmp_path: Path) -> None:
    """One over the other would add up; whole weights must leave nothing of an adapter."""
    adapters = {1: make_adapter(1), 2: make_adapter(2), 4: make_adapter(4, TARGETS[:1])}
    base = served.weights(0)
    async with served.engine() as engine:
        tasks = launch(engine, batch(4, new=300))
        for version in (1, 2, 3, 4):
            await until(grown(engine, version * 30))
            if version in adapters:
                await engine.update(version, saved(adapters[version], tmp_path / f"{version}.safetensors"), base)
            else:
                await engine.update(version, served.weights(3))
        done = await asyncio.gather(*tasks)
    models = {version: with_adapter(adapter) for version, adapter in adapters.items()}
    models |= {0: make_model(0), 3: make_model(3)}
    for generation in done:
        assert [version for version, _ in generation.segments] == [0, 1, 2, 3, 4]
        assert generation.logprobs == pytest.approx(segment_logprobs(models, generation), abs=TOLERANCE)


async def test_an_adapter_of_another_model_is_refused(served: Served, tmp_path: Path) -> None:
    """The old weights go on."""
    foreign = make_adapter(1)
    shape = AdapterShape(2, 4.0, 2.0, ("model.layers.9.mlp.up_proj",))
    path = saved(Adapter(dict(foreign), shape), tmp_path / "1.safetensors")
    async with served.engine() as engine:
        with pytest.raises(WeightsError, match=r"layers\.9"):
            await engine.update(1, path, served.weights(0))
        assert engine.version == 0
        assert (await engine.generate(batch(1)[0])).segments == ((0, 60),)
