"""Adapters must be peft's own mathematics, and nothing but them may be trained, saved or sent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.trainer.config import LoraConfig, TrainerConfig
from actors.trainer.learner import Learner
from actors.trainer.lora import attach, detach
from schemas import UserError
from tests.actors.tiny_models import gpt2, llama, qwen3, samples

LORA = {"rank": 4, "alpha": 8}
IDS = torch.arange(1, 13)[None]


def config(**changes: object) -> TrainerConfig:
    return TrainerConfig(**({"lr": 1e-2, "minibatches": 2, "lora": LORA} | changes))


def trained(model: PreTrainedModel, steps: int = 2, **changes: object) -> Learner:
    learner = Learner(model, config(**changes))
    for step in range(steps):
        learner.step(step, samples(seed=step))
    return learner


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("make", [qwen3, llama, gpt2])
@pytest.mark.parametrize("rslora", [False, True])
def test_merged_weights_are_those_of_pefts_own_merge(make: object, rslora: bool) -> None:
    """GPT-2 keeps its matrices transposed."""
    learner = trained(make(), lora=LORA | {"rslora": rslora})  # type: ignore[operator]
    whole = learner.weights(torch.float32)
    plain = make()  # type: ignore[operator]
    plain.load_state_dict(whole)
    assert (logits(plain) - logits(learner.model)).abs().max() < 1e-4
    merged = make()  # type: ignore[operator]
    lora = attach(merged, learner.config.lora, 0)
    merged.load_state_dict(learner.model.state_dict())
    for name in lora.shape.targets:
        merged.get_submodule(name).merge()
    for name, tensor in lora.base(merged.state_dict()).items():
        torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-7)


def test_only_adapters_are_trained_and_saved() -> None:
    model = qwen3()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learner = trained(model)
    base = learner.base_weights(torch.float32)
    assert base.keys() == before.keys()
    assert all(torch.equal(base[name], tensor) for name, tensor in before.items())
    assert not torch.equal(
        learner.weights(torch.float32)["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    )
    state = learner.state_dict()
    assert len(state["model"]) == 2 * 2 * 7 == len(state["optimizer"]["state"])
    assert all("lora_" in name for name in state["model"])
