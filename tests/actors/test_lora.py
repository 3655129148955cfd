"""Adapters must be peft's own mathematics, and nothing but them may be trained, saved or sent."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from actors.trainer import checkpoint
from actors.trainer.config import TrainerConfig
from actors.trainer.learner import Learner
from actors.trainer.lora import attach
from bus.weights.tensors import to_bytes
from schemas import UserError
from tests.actors.tiny_models import gpt2, llama, qwen3, samples

Make = Callable[[], PreTrainedModel]
LORA: dict[str, object] = {"rank": 4, "alpha": 8}
IDS = torch.arange(1, 13)[None]
UP = "model.layers.0.mlp.up_proj.weight"


def config(**changes: object) -> TrainerConfig:
    return TrainerConfig(**({"lr": 1e-2, "minibatches": 2, "lora": LORA} | changes))  # type: ignore[arg-type]


def trained(model: PreTrainedModel, steps: int = 2, **changes: object) -> Learner:
    learner = Learner(model, config(**changes))
    for step in range(steps):
        learner.step(step, samples(seed=step))
    return learner


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("make", [qwen3, llama, gpt2])
@pytest.mark.parametrize("rslora", [False, True])
def test_merged_weights_are_those_of_pefts_own_merge(make: Make, rslora: bool) -> None:
    """GPT-2 keeps its matrices transposed."""
    learner = trained(make(), lora=LORA | {"rslora": rslora})
    whole = learner.weights(torch.float32)
    plain = make()
    plain.load_state_dict(whole)
    assert (logits(plain) - logits(learner.model)).abs().max() < 1e-4
    merged = copy.deepcopy(learner.model)
    for module in merged.modules():
        if hasattr(module, "merge"):
            module.merge()
    of_peft = {name.replace(".base_layer.", "."): tensor for name, tensor in merged.state_dict().items()}
    assert same(whole, {name: of_peft[name] for name in whole})


def test_only_adapters_are_trained_saved_and_sent() -> None:
    model = qwen3()
    full = sum(tensor.numel() for tensor in model.parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    untouched = to_bytes(Learner(qwen3(), config(lora=None)).weights(torch.float32))
    learner = trained(model)
    assert same(learner.base_weights(torch.float32), before)
    assert to_bytes(learner.base_weights(torch.float32)) == untouched  # so version 0 is what it always was
    assert not torch.equal(learner.weights(torch.float32)[UP], before[UP])
    state = learner.state_dict()
    assert len(state["model"]) == 2 * 2 * 7 == len(state["optimizer"]["state"])
    adapter = learner.adapter(torch.float32)
    assert adapter.keys() == {name.replace(".default", "") for name in state["model"]}
    assert sum(t.numel() for t in adapter.values()) == sum(t.numel() for t in state["model"].values()) < 0.6 * full


def test_training_resumed_from_a_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    learner = trained(qwen3(), steps=2)
    checkpoint.save(tmp_path, 2, learner.state_dict())
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None
    for step in (2, 3):
        learner.step(step, samples(seed=step))
    torch.manual_seed(99)
    resumed = Learner(qwen3(), config())
    resumed.load_state_dict(loaded[1])
    for step in (2, 3):
        resumed.step(step, samples(seed=step))
    assert same(learner.weights(torch.float32), resumed.weights(torch.float32))


def test_a_learner_for_a_model_that_has_adapters_begins_anew() -> None:
    """A replay goes on with the model of the phase before it, under another recipe."""
    model = trained(qwen3()).model
    again, fresh = Learner(model, config()), Learner(qwen3(), config())
    assert same(again.state_dict()["model"], fresh.state_dict()["model"])
    without = Learner(model, config(lora=None))
    assert same(without.weights(torch.float32), qwen3().state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_initial_reference_is_the_base_without_adapters() -> None:
    """No second model in memory, and the very numbers of one."""
    changes: dict[str, object] = {"reference": "initial", "kl": {"coef": 0.1}}
    shared = trained(qwen3(), **changes)
    apart = Learner(qwen3(), config(**changes))
    apart._base_is_reference, apart._reference = False, qwen3()
    for step in range(2):
        apart.step(step, samples(seed=step))
    assert same(shared.weights(torch.float32), apart.weights(torch.float32))
    assert shared._reference is None


def test_layers_that_are_computed_again_give_the_same_bits() -> None:
    """Of a frozen base no input asks for a gradient; with re-entrant checkpointing adapters would get none."""
    plain, again = (trained(qwen3(), gradient_checkpointing=on) for on in (False, True))
    assert same(plain.weights(torch.float32), again.weights(torch.float32))
    assert again.state_dict()["optimizer"]["state"]


@pytest.mark.parametrize(
    ("make", "targets", "chosen"),
    [
        (qwen3, "all-linear", 14),
        (gpt2, "all-linear", 8),
        (qwen3, ["q_proj", "v_proj"], 4),
        (qwen3, "layers.1.mlp.up_proj", 1),
        (llama, ["all-linear", "lm_head"], 15),
    ],
)
def test_targets_are_named_as_in_peft(make: Make, targets: object, chosen: int) -> None:
    lora = config(lora={"targets": targets}).lora
    assert lora is not None
    assert len(attach(make(), lora, 0).shape.targets) == chosen


@pytest.mark.parametrize(
    ("targets", "told", "remedy"),
    [
        ("q_prj", "no linear layer of Qwen3ForCausalLM is called so", "q_proj"),
        (["up_proj", "xyz"], "names xyz", "q_proj"),
        ("embed_tokens", "no linear layer of Qwen3ForCausalLM but Embedding", "all-linear"),
        ("lm_head", "shares its weights with the input embedding", "Leave it out"),
    ],
)
def test_a_target_that_cannot_be_is_refused_with_what_is_near(targets: object, told: str, remedy: str) -> None:
    with pytest.raises(UserError, match=told) as refused:
        Learner(qwen3(), config(lora={"targets": targets}))
    assert remedy in refused.value.remedy


def test_without_peft_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError) as refused:
        Learner(qwen3(), config())
    assert "rollstream[lora]" in refused.value.remedy


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lora": {"dropout": 0.1}}, "engines, which know no dropout"),
        ({"algorithm": "ppo"}, "lora with a critic"),
        ({"lora": {"targets": []}}, "at least 1"),
    ],
)
def test_what_cannot_be_right_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        config(**changes)


@pytest.mark.parametrize(
    ("saved", "resumed", "told"),
    [
        (LORA, LORA | {"rank": 2}, "another rank or other targets"),
        (LORA, LORA | {"targets": ["q_proj"]}, "another rank or other targets"),
        (LORA, None, "holds a LoRA adapter, and the recipe has no trainer.lora"),
        (None, LORA, "holds a whole model, and the recipe has a trainer.lora"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(saved: object, resumed: object, told: str) -> None:
    state = trained(qwen3(), steps=1, lora=saved).state_dict()
    with pytest.raises(UserError, match=told):
        Learner(qwen3(), config(lora=resumed)).load_state_dict(state)
