"""Version 0 of a run: the user's model, or one made on the spot, warm-started by SFT if the recipe says so.

Runs in a process of its own, since it needs torch and the launcher does not. Done once per run folder.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from ops.datasets import FileRows, RowReport, load_dataset, write_notes
from ops.host import initial_model, replace_folder
from ops.recipe import Recipe
from schemas import UserError

if TYPE_CHECKING:
    from ops.text import HfTokenizer

PROGRESS_EVERY_S = 5.0


def prepare(recipe: Recipe, folder: Path) -> Path:
    """Make `folder/initial`, unless it is there. Raises `UserError`."""
    final = initial_model(folder)
    if final.exists():
        return final
    from transformers.utils import logging

    from ops.models import prepare_model

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it writes bars in the midst of ours

    source = prepare_model(recipe.model, recipe.base, folder / "made", recipe.seed)
    tokenizer = tokenizer_of(recipe, source)
    write_notes(folder, check_prompts(recipe, tokenizer))
    if recipe.trainer.lora is not None:
        _check_targets(source, recipe.trainer.lora.targets)
    aside = final.with_name(f".{final.name}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    if recipe.sft is not None:
        _warm_start(recipe, source, tokenizer, aside)
    else:
        _copy(source, tokenizer, aside)
    replace_folder(aside, final)
    return final


def _check_targets(source: str, targets: Sequence[str]) -> None:
    """That adapters fit the model, before minutes are spent on a warm start. Raises `UserError`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from actors.trainer.lora import resolve_targets

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))  # type: ignore[no-untyped-call]
    resolve_targets(model, targets)


def _load(source: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The model {source} cannot be loaded: {str(error).splitlines()[0]}",
            "model.path is the folder of a Hugging Face causal language model, or its name on the hub.",
        ) from error


def tokenizer_of(recipe: Recipe, source: str) -> HfTokenizer:
    """The tokenizer of the model at `source`, with the recipe's chat template. Raises `UserError`."""
    from ops.text import HfTokenizer

    template = None
    if recipe.data.chat_template is not None:
        path = recipe.base / Path(recipe.data.chat_template).expanduser()
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"The chat template {path} cannot be read: {error}.", "data.chat_template names a Jinja file."
            ) from None
    return HfTokenizer(source, recipe.data.template_options, template)


def check_prompts(recipe: Recipe, tokenizer: HfTokenizer) -> list[RowReport]:
    """That the model's tokenizer takes the data's prompts, before minutes are spent on a warm start.

    The first prompt; all of them where their length is bounded. What was found in files. Raises `UserError`.
    """
    reports = []
    count = tokenizer.count if recipe.data.max_prompt_tokens is not None else None
    for held_out in (False, True) if recipe.data.eval is not None else (False,):
        data = load_dataset(recipe.data, recipe.base, seed=recipe.seed, held_out=held_out, count_tokens=count)
        tokenizer.encode_prompt(data.row(0)["prompt"])
        if isinstance(data, FileRows):
            reports.append(data.report)
    return reports


def _copy(source: str, tokenizer: HfTokenizer, aside: Path) -> None:
    model = _load(source)
    model.save_pretrained(aside)
    tokenizer.save(aside)


def _warm_start(recipe: Recipe, source: str, tokenizer: HfTokenizer, aside: Path) -> None:
    import torch

    from actors.functions import load_function
    from actors.trainer.config import SftConfig
    from actors.trainer.sft import train_sft

    assert recipe.sft is not None
    torch.set_num_threads(recipe.trainer.threads)
    demonstration = load_function(recipe.sft.examples, recipe.base)
    config = SftConfig(**recipe.sft.model_dump(exclude={"examples"}))
    end = tokenizer.eos_token_id
    model = _load(source)

    def example(progress: float, random: Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
        prompt, response = demonstration(random, progress)
        return tokenizer.encode_prompt(prompt), (*tokenizer.encode(response), end)

    started = shown = time.monotonic()
    mean = 0.0

    def on_step(step: int, loss: float) -> None:
        nonlocal shown, mean
        mean = loss if step == 0 else 0.95 * mean + 0.05 * loss
        now = time.monotonic()
        if now - shown > PROGRESS_EVERY_S or step + 1 == config.steps:
            shown = now
            left = (now - started) / (step + 1) * (config.steps - step - 1)
            print(f"warm start: step {step + 1} of {config.steps}, loss {mean:.3f}, {left:.0f} s left", flush=True)

    train_sft(model, example, config, on_step)
    model.save_pretrained(aside)
    tokenizer.save(aside)


def main(recipe_yaml: str, folder: Path) -> None:
    """`prepare` as the whole of a process. Exits with 2 after a `UserError`, which it leaves in a file."""
    from ops.host import EXIT_USER_ERROR, ProcessSpec
    from ops.logging import quiet_libraries

    quiet_libraries()
    spec = ProcessSpec((("trainer", "prepare"),), "", "", folder, recipe_yaml)
    spec.error_file.parent.mkdir(parents=True, exist_ok=True)
    spec.error_file.unlink(missing_ok=True)
    try:
        prepare(Recipe.from_yaml(recipe_yaml), folder)
    except UserError as error:
        spec.leave(error)
        sys.exit(EXIT_USER_ERROR)
