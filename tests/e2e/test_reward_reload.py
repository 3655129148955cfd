"""A reward is mended in the middle of a run, and the log says which of its states gave which number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bus.table import BATCHES, SCORED
from schemas import Batch, Scored
from tests.e2e.harness import Brake, Launched, assert_sound, read_all

pytestmark = pytest.mark.e2e

STEPS = 24  # enough for others to come while the run is braked


def test_a_reward_is_changed_twice_while_a_run_goes_on_and_a_broken_file_changes_nothing(
    launch: Callable[..., Launched], brake: Brake, tmp_path: Path
) -> None:
    file = tmp_path / "brake.py"
    first = file.read_text()
    run = launch(brake.override, f"steps={STEPS}", "reward.workers=2", "reward.children=1")
    run.until_step(1)
    pids = [run.pid(name) for name in ("reward-0", "reward-1")]
    file.write_text("def reward(:\n")
    told, status = _reload(run)
    assert (status, told.count("kept sha256-"), told.count("SyntaxError")) == (1, 2, 2), told
    scored_before = _scored(run)
    file.write_text(first.replace("return len", "return 5.0 + len"))
    told, status = _reload(run)
    assert (status, told.count(" -> sha256-")) == (0, 2), told
    run.until("verdicts of the new function", lambda: any((s.reward or 0) >= 5 for s in _scored(run)))
    brake.release()
    assert [run.pid(name) for name in ("reward-0", "reward-1")] == pids, "nobody was started again"
    assert run.ends() == 0, run.output
    assert_sound(run.folder, STEPS)
    verdicts = _scored(run)
    old = {verdict.reward_digest for verdict in scored_before}
    new = {verdict.reward_digest for verdict in verdicts} - old
    assert (len(old), len(new)) == (1, 1)
    assert all((verdict.reward_digest in new) == ((verdict.reward or 0) >= 5) for verdict in verdicts)
    (batches,) = read_all(run.folder, BATCHES)
    assert any(isinstance(batch, Batch) and batch.seen.get("reward_digests") == 2 for batch in batches)
    assert run.events("reward-0", "reward_reload_failed")
    assert run.events("reward-0", "reward_reloaded")[-1]["digest"] in new


def _reload(run: Launched) -> tuple[str, int]:
    command = Launched(["reward", "reload", str(run.folder)], run.folder)
    status = command.ends()
    return command.output, status


def _scored(run: Launched) -> list[Scored]:
    (messages,) = read_all(run.folder, SCORED)
    return [message for message in messages if isinstance(message, Scored)]
