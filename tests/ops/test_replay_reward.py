"""A mended reward is only mended if every verdict that it changes is known, and no other is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from actors.reward.verdict import Verdict
from bus.table import ROLLOUTS, SCORED
from ops.log_source import open_log
from ops.replay import into_bus, into_reward, into_trainer
from ops.replay.changes import Changes
from ops.replay.into_reward import sentence
from ops.replay.rescore import Rescored
from schemas import Rollout, UserError
from tests.ops.recorded_run import STEPS, altered, record_altered

OTHER = '''
def cut_is_wrong(response, task, finish):
    """As the recorded one, but an answer that was cut has nothing."""
    words = response.split()
    share = len(set(words)) / (len(words) + 1)
    return {"reward": share if finish == "stop" else 0.0, "ended": float(finish == "stop")}

def breaks(response, finish):
    if finish == "length":
        raise ValueError("cut")
    words = response.split()
    return len(set(words)) / (len(words) + 1)

def constant(response):
    return 0.25
'''


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of rewards in the current folder."""
    (tmp_path / "other.py").write_text(OTHER)
    monkeypatch.chdir(tmp_path)
    return "reward.function=other.py"


async def cut_answers(recorded: Path) -> set[str]:
    async with open_log(str(recorded)) as source:
        rollouts = [entry.message() async for entry in source.read(ROLLOUTS)]
    return {r.sample_id for r in rollouts if isinstance(r, Rollout) and r.finish == "length"}


def listed(told: str) -> list[str]:
    """The samples that have a line of their own."""
    return re.findall(r"^(\d+-\d+): ", told, re.MULTILINE)


async def test_the_same_reward_changes_nothing(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await into_reward.main(str(recorded), [], None, True) == 0
    told = capsys.readouterr().out
    assert "\n" not in told.partition("verdicts changed")[0]
    assert told.startswith("0 of ")


async def test_every_verdict_that_changed_is_listed_and_no_other(
    recorded: Path, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The naive twin: what the new function says otherwise is what was cut."""
    out = tmp_path / "verdicts.jsonl"
    assert await into_reward.main(str(recorded), [f"{other}:cut_is_wrong"], out, False) == 0
    told = capsys.readouterr().out
    cut = await cut_answers(recorded)
    assert cut
    assert sorted(listed(told)) == sorted(cut)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["sample_id"] for line in lines if line["changed"]} == cut
    assert f"{len(cut)} of {len(lines)} verdicts changed (scored → scored {len(cut)})" in told
    assert all(line["after"]["parts"]["ended"] == (line["sample_id"] not in cut) for line in lines)
    assert await into_reward.main(str(recorded), [f"{other}:cut_is_wrong"], None, True) == 1


async def test_a_reward_that_fails_is_a_change_and_never_a_zero(
    recorded: Path, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await into_reward.main(str(recorded), [f"{other}:breaks", "reward.retries=0"], None, False) == 0
    told = capsys.readouterr().out
    cut = await cut_answers(recorded)
    assert sorted(listed(told)) == sorted(cut)
    assert f"(scored → error {len(cut)})" in told
    assert "→ error (ValueError: cut" in told


async def test_answers_without_a_verdict_are_scored_too(recorded: Path, other: str, tmp_path: Path) -> None:
    """A reward worker that died is a reason to score again."""
    async with open_log(str(recorded)) as source:
        log = await altered(source)
    log.remove_last(SCORED.name)
    path = await record_altered(log, recorded, tmp_path / "less.rollstream")
    out = tmp_path / "verdicts.jsonl"
    await into_reward.main(str(path), [], out, False)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == (await log.info(ROLLOUTS)).messages
    assert [line["before"] for line in lines].count(None) == 1
    assert lines[-1]["before"] is None
    assert lines[-1]["after"]["status"] == "scored"


async def test_a_damaged_recording_is_told_and_passes_no_check(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No verdict changed, of those that are left."""
    cut = tmp_path / "cut.rollstream"
    cut.write_bytes(recorded.read_bytes()[:-2000])
    assert await into_reward.main(str(cut), [], None, False) == 0
    assert "damage: the file does not end as a recording does" in capsys.readouterr().out
    assert await into_reward.main(str(cut), [], None, True) == 1
    assert await into_bus.main(str(cut), tmp_path / "fresh", None, None, "max", 0, None, None, False) == 1
    assert "damage: the file does not end as a recording does" in capsys.readouterr().out


async def test_a_trainer_is_replayed_with_the_new_rewards(recorded: Path, other: str) -> None:
    """Equal rewards teach nothing: the weights must stay those of version 0, whatever the recorded rewards were."""
    async with open_log(str(recorded)) as source:
        changes = Changes((f"{other}:constant",))
        outcome, steps = await into_trainer.replay_log(source, changes, rescore=True)
    assert (outcome.done, outcome.left_out) == (STEPS, 0)
    assert {step.replayed["reward_mean"] for step in steps} == {0.25}
    assert {step.replayed["reward"] for step in steps} == {0.25}
    assert len({step.replayed_digest for step in steps}) == 1
    assert len({step.recorded_digest for step in steps}) == STEPS


async def test_samples_without_a_new_verdict_are_left_out_of_the_training(recorded: Path, other: str) -> None:
    """As a run would drop them; a 0 in their place would teach what nobody meant."""
    async with open_log(str(recorded)) as source:
        changes = Changes((f"{other}:breaks", "reward.retries=0"))
        outcome, steps = await into_trainer.replay_log(source, changes, stop=2, rescore=True)
    assert outcome.left_out > 0
    assert sum(step.recorded["samples"] - step.replayed["samples"] for step in steps) == outcome.left_out


async def test_a_reward_that_is_not_there_is_told(recorded: Path) -> None:
    with pytest.raises(UserError, match=r"no file .*nowhere\.py"):
        await into_reward.main(str(recorded), ["reward.function=nowhere.py:f"], None, False)


def test_a_change_is_told_in_one_line() -> None:
    before, after = Verdict("scored", 1.0, {"a": 1.0, "b": 2.0}), Verdict("scored", 0.5, {"a": 1.0, "b": 0.0})
    assert sentence(Rescored("3-1", 7, before, after)) == "3-1: reward 1 → reward 0.5, parts a 1, b 2 → 0"


def test_new_names_of_parts_are_no_change_of_a_verdict() -> None:
    """A reward that merely tells more would else bury what it judges otherwise."""
    before, after = Verdict("scored", 1.0, {"a": 1.0}), Verdict("scored", 1.0, {"a": 1.0, "b": 0.0})
    assert not Rescored("3-1", 7, before, after).changed
    assert Rescored("3-1", 7, before, Verdict("scored", 1.0, {"a": 0.5})).changed
    assert not Rescored("3-1", 7, None, after).changed


async def test_what_episodes_gave_themselves_is_no_verdict_of_a_new_function(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or a function that was never asked would seem to agree."""
    path = Path(__file__).parent / "golden_recordings" / "format1-episodes.rollstream"
    async with open_log(str(path)) as source:
        rollouts = [entry.message() async for entry in source.read(ROLLOUTS)]
    own = {r.sample_id for r in rollouts if isinstance(r, Rollout) and r.reward is not None}
    assert await into_reward.main(str(path), [f"{other}:constant"], None, False) == 0
    told = capsys.readouterr().out
    assert 0 < len(own) < len(rollouts)
    assert f"{len(own)} rewards are their episodes' own: no function was asked" in told
    assert not own & set(listed(told))
