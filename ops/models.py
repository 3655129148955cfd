"""Where a run's first weights come from: a folder, the hub, or a function that makes them. Always ends in a folder."""

import hashlib
import inspect
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from actors.functions import load_function
from schemas import Config, UserError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


class ModelConfig(Config):
    """The recipe's `model` section: exactly one of `path` and `make`."""

    path: str | None = Field(default=None, min_length=1)
    """A folder as transformers writes it, relative to the recipe's folder, or a model's name on the hub."""
    make: str | None = Field(default=None, min_length=1)
    """A function `path/to/file.py:function` that writes such a folder, called as `function(path: Path, seed: int)`."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.path is None) == (self.make is None):
            raise ValueError("give either model.path or model.make, and not both")
        return self


def prepare_model(config: ModelConfig, base: Path, cache: Path, seed: int) -> str:
    """The folder that holds the model and its tokenizer; made or fetched if it has to be.

    `base` is the recipe's folder. A made model is kept in `cache` and made again only for another function, another
    text of the file that it stands in, or another seed. Raises `UserError`.
    """
    if config.make is not None:
        return str(_made(config.make, load_function(config.make, base), cache, seed))
    assert config.path is not None
    return find_model(config.path, base, "model.path")


def find_model(path: str, base: Path, key: str) -> str:
    """The folder of the model that the recipe's `key` names: a folder by `base`, or fetched from the hub.

    Raises `UserError`.
    """
    folder = base / Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"The model folder {folder} has no config.json.", "It must be one that transformers wrote.")
        return str(folder.resolve())
    if not _HUB_NAME.fullmatch(path) or path.startswith("."):
        raise UserError(f"There is no model folder {folder}.", f"Correct {key}; it is relative to the recipe.")
    return _fetched(path, folder, key)


def _fetched(name: str, folder: Path, key: str) -> str:
    """The local copy of a model of the hub; fetched unless it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        try:
            return snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True)
        except LocalEntryNotFoundError:
            return snapshot_download(name, allow_patterns=_HUB_FILES)
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"The model '{name}' is neither a folder ({folder}) nor to be had from the hub: {reason}.",
            f"Correct {key}, or fetch the model where there is a network and name its folder.",
        ) from error


def _made(spec: str, make: Callable[[Path, int], Any], cache: Path, seed: int) -> Path:
    folder = cache / f"{spec.rpartition(':')[2]}-{_key(spec, make, seed)}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    aside = cache / f".{folder.name}-{os.getpid()}-{time.time_ns()}"  # of this call alone, and on the same disk
    try:
        make(aside, seed)
        if not (aside / "config.json").is_file():
            raise UserError(
                f"'{spec}' made no model: there is no config.json in the folder it was given.",
                "Call save_pretrained(path) on the model and on the tokenizer.",
            )
        for file in aside.rglob("*"):  # transformers writes weights that only their owner may read
            file.chmod(0o755 if file.is_dir() else 0o644)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise  # otherwise another process was faster, and made the same
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _key(spec: str, make: Callable[..., Any], seed: int) -> str:
    source = inspect.getsourcefile(make)
    text = Path(source).read_bytes() if source else b""
    return hashlib.sha256(b"\0".join([spec.encode(), text, str(seed).encode()])).hexdigest()[:12]
