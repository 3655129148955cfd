"""Names and shapes of the weights in a file, without reading them: whether they fit is told before any is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from actors.rollout.engine import WeightsError

Shapes = Mapping[str, tuple[int, ...]]

_LENGTH_BYTES = 8  # little-endian, of the JSON header that follows
_HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit
_TIED = "lm_head.weight"  # may be left out, or repeat the embedding


def weight_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of a `.safetensors` file or of all in a directory. Raises `WeightsError`."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in files:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
                if length > _HEADER_BYTES_MAX:
                    raise ValueError(f"{file} is no safetensors file")
                header = json.loads(opened.read(length))
            shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"cannot read weights from {path}: {error}") from error
    if not shapes:
        raise WeightsError(f"no *.safetensors with weights in {path}")
    return shapes


def check_shapes(model: Shapes, given: Shapes) -> None:
    """Raises `WeightsError` unless `given` has all weights of the model, no others, and each of the same shape."""
    missing = sorted(model.keys() - given.keys() - {_TIED})
    unknown = sorted(given.keys() - model.keys() - {_TIED})
    misshapen = sorted(
        f"{name} {given[name]} for {model[name]}" for name in model.keys() & given.keys() if model[name] != given[name]
    )
    for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", misshapen)):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise WeightsError(f"weights do not fit the model: {what}: {shown}")
