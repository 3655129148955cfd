"""Hugging Face folders: as `datasets.save_to_disk` writes them, and as the hub keeps them (`data/train-*.parquet`)."""

import json
import re
from pathlib import Path
from typing import Any

from ops.datasets.config import FILE_ENDINGS
from schemas import UserError

HELD_OUT_SPLITS = ("test", "validation", "valid", "val", "dev")
_DAMAGED = "Save the dataset anew."
_SHARD = re.compile(
    r"(?P<split>[A-Za-z][A-Za-z0-9_]*?)(?:-\d+-of-\d+(?:-\w+)?|[-_.]?\d*)(?:\.jsonl(?:\.gz|\.zst)?|\.parquet|\.arrow)"
)


def files_of(folder: Path, split: str | None, held_out: bool) -> list[Path]:
    """The data files of a folder's split, in order.

    Without a `split` it is `train`, or if `held_out` the first of `HELD_OUT_SPLITS` that there is; a folder of one
    split needs no name. Raises `UserError` with the splits that there are.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = {name: _saved(folder / name) for name in _listed(folder / "dataset_dict.json", "splits")}
    elif (folder / "state.json").is_file():
        own = _json(folder / "state.json").get("_split")
        splits = {str(own or "train"): _saved(folder)}
    else:
        splits = _by_name(folder)
    if not splits:
        raise UserError(f"The folder {folder} holds no data files.", _remedy(folder))
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    wanted = [split] if split is not None else list(HELD_OUT_SPLITS) if held_out else ["train"]
    for name in wanted:
        if name in splits:
            return splits[name]
    names = ", ".join(sorted(splits))
    raise UserError(
        f"The folder {folder} has no split {' or '.join(wanted)}, only {names}.",
        f"Name one behind the folder, as {folder.name}#{next(iter(sorted(splits)))}.",
    )


def _saved(folder: Path) -> list[Path]:
    """The files that `save_to_disk` wrote into `folder`."""
    state = _json(folder / "state.json")
    try:
        files = [folder / str(item["filename"]) for item in state["_data_files"]]
    except (KeyError, TypeError):
        raise UserError(f"{folder / 'state.json'} names no data files.", _DAMAGED) from None
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder / 'state.json'} names {file.name}, which is not there.", "Copy the whole folder.")
    return files


def _listed(path: Path, key: str) -> list[str]:
    value = _json(path).get(key)
    if not isinstance(value, list):
        raise UserError(f"{path} has no list of {key}.", _DAMAGED)
    return [str(item) for item in value]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read: {error}.", "Copy the whole folder, or save the dataset anew."
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no map.", _DAMAGED)
    return value


def _by_name(folder: Path) -> dict[str, list[Path]]:
    """Files by the split that their names begin with: of the folder itself, or of `data/` in it."""
    for place in (folder, folder / "data"):
        splits: dict[str, list[Path]] = {}
        for file in sorted(place.glob("*"), key=_natural):
            match = _SHARD.fullmatch(file.name)
            if match and file.is_file():
                splits.setdefault(match["split"], []).append(file)
        if splits:
            return splits
    return {}


def _natural(path: Path) -> list[tuple[int, str]]:
    """`test2` before `test10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name) if part]


def _remedy(folder: Path) -> str:
    inner = sorted(
        {file.parent.relative_to(folder).as_posix() for end in FILE_ENDINGS for file in folder.glob(f"*/*{end}")}
    )
    if inner:
        return f"Name one of the folders in it: {', '.join(inner[:8])}."
    return "It must be as datasets.save_to_disk writes it, or hold files such as train-00000-of-00001.parquet."
