"""The frozen policy that a KL penalty holds on to."""

import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.trainer.sections import INITIAL
from schemas.errors import UserError


def load_reference(name: str, model: PreTrainedModel, base: Path | None, initial: Path | None) -> PreTrainedModel:
    """The reference that a recipe names, on the device of `model`, in eval mode and without gradients.

    "initial" is version 0, in the folder `initial`; without that folder a copy of `model`. Anything else is a model
    folder, relative to `base`, or a model's name on the hub. Raises `UserError` if it cannot be loaded, or has another
    vocabulary than `model`.
    """
    if name == INITIAL and initial is None:
        return _frozen(copy.deepcopy(model))
    folder = initial if name == INITIAL else (base or Path()) / Path(name).expanduser()
    assert folder is not None
    source = str(folder) if folder.is_dir() else name
    if source == name and name.startswith((".", "/", "~")):  # on the hub nothing is called so
        raise UserError(
            f"There is no model folder {folder}.", "Correct trainer.reference; it is relative to the recipe."
        )
    try:
        reference = _loaded(source)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The reference policy {source} cannot be loaded: {str(error).splitlines()[0]}",
            "trainer.reference is 'initial', a model folder, relative to the recipe, or a model's name on the hub.",
        ) from error
    sizes = [m.config.get_text_config().vocab_size for m in (reference, model)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"The reference policy {source} has {sizes[0]} tokens, the model {sizes[1]}: their probabilities cannot be "
            "compared.",
            "Name a reference with the model's own tokenizer.",
        )
    reference.to(device=model.device)  # type: ignore[call-arg]  # in place; its signature is lost in a decorator
    return _frozen(reference)


def _loaded(source: str) -> PreTrainedModel:
    """The hub is asked only for what is not here: a run goes on when it cannot be reached."""
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, local_files_only=True
        )
    except OSError:
        if Path(source).is_dir():
            raise
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    model.train(False)
    model.requires_grad_(False)
    return model
