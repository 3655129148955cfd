"""A run that trains adapters, with a trainer that is killed: what is sent, what is saved, and what comes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from bus.table import WEIGHTS
from ops import audit, diff
from schemas import WeightVersion
from tests.e2e.harness import END_WAIT_S, Launched, assert_sound, read_all

pytestmark = pytest.mark.e2e

STEPS = 10  # of which the first three are saved
LORA = ("trainer.lora.rank=4", "trainer.lr=1e-2", "trainer.keep_versions=20", "trainer.reference=initial")


def test_a_killed_lora_run_is_sound_and_its_replay_bit_identical(
    launch: Callable[..., Launched], capsys: pytest.CaptureFixture[str]
) -> None:
    """The base is in no checkpoint: the trainer that comes back knows it by the log, and takes no other one."""
    run = launch(f"steps={STEPS}", *LORA)
    run.until("a checkpoint", lambda: bool(run.events("trainer", "checkpoint_saved")), END_WAIT_S)
    run.kill("trainer")
    assert run.ends() == 0, run.output
    assert_sound(run.folder, STEPS)
    assert [line["version"] for line in run.events("trainer", "trainer_restored")][1] >= 3

    ((first, *others),) = read_all(run.folder, WEIGHTS)
    assert isinstance(first, WeightVersion)
    assert (first.kind, first.base) == ("full", -1)
    assert {(event.kind, event.base) for event in others if isinstance(event, WeightVersion)} == {("adapter", 0)}
    assert all(event.nbytes < first.nbytes / 9 for event in others if isinstance(event, WeightVersion))
    checkpoints = [path.stat().st_size for path in (run.folder / "checkpoints").glob("*/state.pt")]
    assert max(checkpoints) < first.nbytes / 2

    assert asyncio.run(audit.main(str(run.folder), False, True)) == 0
    capsys.readouterr()
    assert asyncio.run(diff.main(str(run.folder), 0, None, 3, True)) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["max"] < 1e-4
    assert told["tokens"] > 100

    weights = run.folder / "initial" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    resumed = launch(f"steps={STEPS + 1}", *LORA, resume=True)
    assert resumed.ends() == 2, resumed.output  # nothing else would tell before the rewards fall
    assert "The base of the LoRA adapters has changed" in " ".join(resumed.output.split())
