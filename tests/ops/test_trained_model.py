"""What a run leaves behind is what was trained, for whoever loads it with the libraries that everybody has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ops.prepare import prepare
from ops.recipe import load_recipe
from ops.trained_model import export_model, load_learner, weights_of
from recipes.running_total import make_model
from schemas import UserError
from tests.actors.tiny_models import samples
from tests.ops.recorded_run import RECIPE

IDS = torch.arange(1, 13)[None]


@pytest.fixture
def initial(tmp_path: Path) -> Path:
    folder = tmp_path / "initial"
    make_model(folder, 0)
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_adapters_are_exported_merged_and_as_peft_writes_them(initial: Path, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, ["trainer.lora.rank=4", "trainer.lr=1e-2"])
    learner = load_learner(recipe, initial)
    assert set(weights_of(learner, recipe)) == set(AutoModelForCausalLM.from_pretrained(initial).state_dict())
    learner.step(0, samples())
    assert all(".lora_" in name for name in weights_of(learner, recipe))
    export_model(learner, initial, tmp_path / "out" / "model")
    export_model(learner, initial, tmp_path / "out" / "model")  # again, after a crash
    assert sorted(os.listdir(tmp_path / "out")) == ["adapter", "model"]

    base = AutoModelForCausalLM.from_pretrained(initial)
    before = logits(base)
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model"))
    adapted = logits(PeftModel.from_pretrained(base, tmp_path / "out" / "adapter"))
    assert torch.equal(adapted, logits(learner.model))
    assert (merged - adapted).abs().max() < 1e-4
    assert (merged - before).abs().max() > 1e-2
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "model").vocab_size > 0


def test_a_target_that_fits_no_layer_is_told_before_the_warm_start(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, ["trainer.lora.targets=q_prj"])
    with pytest.raises(UserError, match="no linear layer of Qwen3ForCausalLM is called so"):
        prepare(recipe, tmp_path)
    assert not (tmp_path / "initial").exists()
