"""The model of a trainer: loaded into a learner, published as weights, exported; in a run and in a replay alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ops.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from actors.trainer.learner import Learner
    from actors.trainer.ranks import Ranks


def load_learner(recipe: Recipe, initial: Path, ranks: Ranks | None = None) -> Learner:
    """A learner with the model in the folder `initial`, in float32, at step 0. Sets this process's torch threads."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it writes bars in the midst of ours
    torch.set_num_threads(recipe.trainer.threads)
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_pretrained(str(initial), dtype=torch.float32)
    return learner_of(model, recipe, initial, ranks)


def learner_of(model: PreTrainedModel, recipe: Recipe, initial: Path, ranks: Ranks | None = None) -> Learner:
    """A learner for `model` as the recipe says, at step 0; `initial` is the folder of version 0.

    With `ranks` it is one of a run's trainer, by the recipe's backend; without, it stands alone, with torch.
    """
    from actors.trainer.learner import Learner

    return Learner(
        model,
        recipe.trainer if ranks is not None else recipe.trainer.model_copy(update={"backend": "torch"}),
        recipe.rollout.temperature,
        max_new_tokens=recipe.rollout.max_new_tokens,
        base=recipe.base,
        initial=initial,
        ranks=ranks,
    )


def weights_of(learner: Learner, recipe: Recipe) -> Mapping[str, torch.Tensor]:
    """The tensors to publish, in the dtype that rollout workers hold; on rank 0, empty elsewhere. All ranks ask.

    With `trainer.lora` version 0 is the whole base, and every later one an `Adapter` over it.
    """
    import torch

    dtype = getattr(torch, recipe.rollout.dtype)
    if learner.config.lora is None:
        return learner.weights(dtype)
    return learner.adapter(dtype) if learner.steps_done else learner.base_weights(dtype)


def export_model(learner: Learner, initial: Path, folder: Path) -> None:
    """Write the model for `from_pretrained` into `folder`, with the tokenizer of `initial`; whole or not at all.

    With `trainer.lora` adapters are merged into it, and stand beside it in peft's own format, in the folder `adapter`.
    All ranks ask, rank 0 writes.
    """
    import torch

    if learner.config.lora is not None:
        _export_adapter(learner, initial, folder.with_name("adapter"))
    weights = learner.weights(torch.float32)
    if learner.ranks.rank == 0:
        write_model(learner.model, weights, initial, folder)


def write_model(model: PreTrainedModel, weights: Mapping[str, torch.Tensor], initial: Path, folder: Path) -> None:
    """Write `weights` as a model like `model` into `folder`, with the tokenizer of `initial`; whole or not at all."""
    from ops.host import replace_folder
    from ops.text import HfTokenizer

    aside = folder.with_name(f".{folder.name}-{os.getpid()}")
    model.save_pretrained(aside, state_dict=dict(weights))
    HfTokenizer(str(initial)).save(aside)
    replace_folder(aside, folder)


def _export_adapter(learner: Learner, initial: Path, folder: Path) -> None:
    from ops.host import replace_folder

    aside = folder.with_name(f".{folder.name}-{os.getpid()}")
    learner.save_adapter(aside, str(initial.resolve()))
    if learner.ranks.rank == 0:
        replace_folder(aside, folder)
