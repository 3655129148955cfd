"""`status` is asked when something seems wrong: it must tell what is there, and what is not."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bus.memory import MemoryBus, MemoryHub
from ops.recipe import Recipe
from ops.status import Status, main, print_status, read_status
from ops.summary import summarise
from ops.view import RunView
from schemas import Control, Prompt, StepDone, UserError, WeightVersion

RECIPE = Recipe.model_validate(
    {"name": "a-run", "steps": 5, "model": {"path": "m"}, "data": {"train": "t.py:f"}, "base": "/nowhere"}
)
BEAT: dict[str, object] = {
    "actor": "rollout-0",
    "role": "rollout",
    "process": "host:1",
    "cpu_s": 2.5,
    "idle_share": 0.25,
    "idle_why": "prompts",
}


@pytest.fixture
async def bus() -> MemoryBus:
    bus = MemoryBus("a-run", MemoryHub())
    await bus.connect()
    return bus


async def status_of(bus: MemoryBus, beat: dict[str, object] | None) -> Status:
    beating = asyncio.create_task(_beat(bus, beat)) if beat else None
    try:
        return await read_status(bus, listen_s=0.2)
    finally:
        if beating is not None:
            beating.cancel()


def text_of(status: Status) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    print_status(status, console)
    return console.export_text()


async def test_a_run_is_told_by_its_log_and_its_beats(bus: MemoryBus) -> None:
    """Newest step and version, what waits for whom, and who is up."""
    await bus.setup()
    await bus.publish(Control(action="start", nonce="1", recipe=RECIPE.to_yaml()))
    await bus.publish(WeightVersion(version=3, path="v3", digest="d", nbytes=10))
    await bus.publish(StepDone(step=2, version=3, metrics={"reward_mean": 0.75}, staleness=np.array([1])))
    await bus.publish(Prompt(group_id=0, index=0, group_size=1, prompt="p", task={}, seed=0, min_version=0))
    status = await status_of(bus, BEAT)
    assert (status.step, status.version, status.steps_planned, status.finished) == (2, 3, 5, False)
    assert status.queues["rollout"]["waiting"] == 1
    assert [(actor["actor"], actor["idle_share"], actor["cpu_s"]) for actor in status.actors] == [
        ("rollout-0", 0.25, 2.5)
    ]
    text = text_of(status)
    for part in ("3 of 5 steps done", "weight version 3", "reward_mean 0.750", "rollout-0", "25%"):
        assert part in text


async def test_status_tells_how_many_workers_are_wanted_and_there(bus: MemoryBus) -> None:
    """After `scale`, until the last one has handed over."""
    await bus.setup()
    told = {"control_seq": 3, "rollout_wanted": 2, "rollout_here": 2, "rollout_leaving": 4}
    status = await status_of(bus, {"actor": "launcher", "role": "launcher", "process": "a:1", **told})
    assert status.workers == {"rollout": {"wanted": 2, "here": 2, "leaving": 4}}
    assert "rollout workers beside the launcher: 2 of 2, 4 leaving" in text_of(status)


async def _beat(bus: MemoryBus, beat: dict[str, object]) -> None:
    while True:
        await bus.beat(beat)
        await asyncio.sleep(0.02)


async def test_a_run_that_has_only_begun_has_no_step_and_says_so(bus: MemoryBus) -> None:
    """Nothing is published yet, nobody is heard: every place must bear it."""
    await bus.setup()
    status = await status_of(bus, None)
    assert (status.step, status.version, status.metrics, status.actors) == (None, None, {}, [])
    text = text_of(status)
    assert "0 steps done; weight version none published" in text
    assert "No actor was heard" in text


async def test_a_run_that_the_server_does_not_know_is_a_mistake_of_the_name(bus: MemoryBus) -> None:
    """Waiting for ever on streams that are not there would look like a hang."""
    with pytest.raises(UserError, match="no run a-run"):
        await read_status(bus, listen_s=0.01)


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_run_that_is_not_up_is_told_by_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """Its server went with it; what it came to lies in its folder."""
    (tmp_path / "run.json").write_text(json.dumps({"run": "a-run", "url": "nats://127.0.0.1:1", "pid": 1}))
    with pytest.raises(UserError, match="left no summary") as caught:
        await main(str(tmp_path), as_json)
    assert "--resume" in caught.value.remedy
    (tmp_path / "summary.json").write_text(summarise(RunView("a-run", 5, 4, 8, 0.0), 1.0).to_json())
    assert await main(str(tmp_path), as_json) == 0
    out = capsys.readouterr().out
    assert (json.loads(out)["run"] if as_json else out.split()[0]) == "a-run"
    os.utime(tmp_path / "summary.json", (1.0, 1.0))
    assert await main(str(tmp_path), as_json) == 0
    told = capsys.readouterr()
    assert "newest start was killed, or ended by an error" in told.err, "the summary is an older one"
    assert (json.loads(told.out)["run"] if as_json else told.out.split()[0]) == "a-run"


async def test_a_name_that_is_no_run_is_told_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run names carry a time stamp that nobody types right."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="There is no run in"):
        await main(None, as_json=False)
    folder = tmp_path / "runs" / "total-20250101-120000"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        await main("total-20250101-120001", as_json=False)
    assert folder.name in caught.value.remedy
