"""Recordings that earlier programs made, read for ever. Never change them; docs/recordings.md tells how to add one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bus.table import STREAM_OF
from ops.audit import audit_log
from ops.invariants import READ_ORDER
from ops.log_source import initial_model_of, open_log
from ops.recipe import Recipe
from ops.recording.reader import READERS, Recording
from schemas.messages import TYPES

FOLDER = Path(__file__).parent / "golden_recordings"
FILES = sorted(FOLDER.glob("*.rollstream"))
FILE_BYTES_MAX = 150_000
FIRST = {"prompt", "partial", "rollout", "scored", "dropped", "batch", "weights", "step", "control"}
TYPES_IN = {
    "format1": FIRST,
    "format1-evaluations": FIRST | {"evaluation"},
    "format1-episodes": FIRST - {"dropped"} | {"turn", "answer", "note"},
}
EVERY_FILE = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_every_format_has_its_golden_recording() -> None:
    """Or a reader of an old format could be broken and nobody would know."""
    assert {int(path.stem.removeprefix("format").partition("-")[0]) for path in FILES} == set(READERS)
    assert all(path.stat().st_size < FILE_BYTES_MAX for path in FILES)


@EVERY_FILE
async def test_a_golden_recording_is_whole_and_its_run_sound(path: Path) -> None:
    """What was clean when it was made must be so for every later auditor."""
    async with open_log(str(path)) as log:
        audit = await audit_log(log)
        assert audit.clean, audit.to_json()
        assert audit.report.ended
        assert not {"malformed entries", "starts of unknown rules"} & set(audit.report.totals)
        assert isinstance(log, Recording)
        assert len(log.digest) == 32


@EVERY_FILE
async def test_every_message_of_a_golden_recording_is_read(path: Path) -> None:
    """By upcasting, where the type has another version by now."""
    found: Counter[str] = Counter()
    async with open_log(str(path)) as log:
        for stream in READ_ORDER:
            async for entry in log.read(stream):
                message = entry.message()
                assert STREAM_OF[type(message)] is stream
                assert message.id == entry.id
                found[message.TYPE] += 1
        totals = sum([(await log.info(stream)).messages for stream in READ_ORDER])
    assert found.total() == totals
    assert found.keys() == TYPES_IN[path.stem]


def test_of_every_type_there_is_one() -> None:
    """A type that is in no recording could change its bytes and nobody would know."""
    assert set().union(*TYPES_IN.values()) == set(TYPES)


@EVERY_FILE
async def test_a_golden_recording_brings_its_model_and_recipe(path: Path, tmp_path: Path) -> None:
    """Replaying it needs both."""
    async with open_log(str(path)) as log:
        assert Recipe.from_yaml(log.recipe_yaml).steps == 4
        model = initial_model_of(log, tmp_path / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in model.iterdir()}
