"""A plotter must see each step once: whatever was killed, whenever it began, wherever the log comes from."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.metrics import METRICS, as_markdown, described
from bus.memory import MemoryBus, MemoryHub
from bus.table import STEPS
from ops.log_source import open_log
from ops.metrics.config import MetricsConfig
from ops.metrics.feed import copy, written_beside
from ops.metrics.jsonl import JsonLines, Printed
from ops.metrics.records import Key, Record, record_of
from ops.metrics.tensorboard import EventFiles
from schemas import Control, Evaluation, StepDone, UserError
from tests.ops.sound_log import RUN, Log, LogInLists

RECIPE = "name: audited\nseed: 3\ntrainer:\n  lr: 0.001\n  loss: ppo\n"
NEVER = asyncio.Event()


def step(i: int) -> StepDone:
    metrics = {"reward_mean": i / 4, "ess": 0.5, "time": 100.0 + i}
    return StepDone(step=i, version=i + 1, metrics=metrics, staleness=[30, 0, i])


def evaluation(version: int, data: str = "held.py:out") -> Evaluation:
    return Evaluation(
        version=version, data=data, reward=0.75, count=4, verdicts={"scored": 3, "timeout": 1}, parts={"form": 0.5}
    )


def log_of(steps: int, *, ended: bool = True) -> Log:
    log = Log()
    log.put(Control(action="start", nonce="a"))
    for i in range(steps):
        log.put(step(i))
        if i % 2 == 0:
            log.put(evaluation(i))
    if ended:
        log.put(Control(action="stop", nonce="end"))
    return log


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_line_holds_all_that_a_step_or_an_evaluation_told(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "deep" / "m.jsonl", RUN)
    assert await copy(LogInLists(log_of(2)), [sink], False, NEVER) == 3
    first, second, evaluated = lines(tmp_path / "deep" / "m.jsonl")
    assert first == {
        "stream": "steps", "id": "0", "run": RUN, "step": 0, "version": 1, "time": 100.0, "reward_mean": 0.0,
        "ess": 0.5, "staleness": [30, 0, 0],
    }  # fmt: skip
    assert (second["step"], second["staleness"]) == (1, [30, 0, 1])
    assert (evaluated["version"], evaluated["data"], evaluated["id"]) == (0, "held.py:out", "0/held.py:out")
    assert (evaluated["eval/reward"], evaluated["eval/failed"], evaluated["eval/parts/form"]) == (0.75, 1.0, 0.5)
    sink.close()


@pytest.mark.parametrize("cut", [0, 1, 40, 10_000])
async def test_a_file_is_gone_on_with_from_wherever_its_writer_was_killed(tmp_path: Path, cut: int) -> None:
    """Also in the midst of a line."""
    path = tmp_path / "m.jsonl"
    whole = JsonLines(path, RUN)
    await copy(LogInLists(log_of(5)), [whole], False, NEVER)
    whole.close()
    expected = path.read_bytes()
    path.write_bytes(expected[: max(0, len(expected) - cut)])
    again = JsonLines(path, RUN)
    assert await copy(LogInLists(log_of(5)), [again], False, NEVER) == (0 if cut == 0 else 1 if cut <= 40 else 8)
    again.close()
    assert path.read_bytes() == expected


@pytest.mark.parametrize(
    "text", ["step,reward\n", '{"step": 1}\n', '{"run": "another", "stream": "steps", "id": "0"}\n']
)
def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"not a line of metrics|metrics of another"):
        JsonLines(path, RUN)
    assert path.read_text() == text


def test_two_writers_of_one_file_would_write_everything_twice(tmp_path: Path) -> None:
    first = JsonLines(tmp_path / "m.jsonl", RUN)
    with pytest.raises(UserError, match="another process"):
        JsonLines(tmp_path / "m.jsonl", RUN)
    first.close()
    JsonLines(tmp_path / "m.jsonl", RUN).close()


async def test_a_repeated_evaluation_is_written_once() -> None:
    """Readers drop duplicates: a redelivery beyond the broker's window stands twice in the log."""
    log = log_of(1)
    log.put(evaluation(0))
    text = io.StringIO()
    assert await copy(LogInLists(log), [Printed(RUN, text)], False, NEVER) == 2
    assert len(text.getvalue().splitlines()) == 2


async def test_a_follower_waits_for_more_and_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored just before the end is written too."""
    monkeypatch.setattr("ops.metrics.feed.LOOK_S", 0.01)
    log, text = log_of(2, ended=False), io.StringIO()
    following = asyncio.create_task(copy(LogInLists(log), [Printed(RUN, text)], True, NEVER))
    await asyncio.sleep(0.05)
    assert not following.done()
    assert len(text.getvalue().splitlines()) == 3
    log.put(step(2))
    log.put(Control(action="stop", nonce="end"))
    log.put(evaluation(2))
    async with asyncio.timeout(30):
        assert await following == 5


def read_events(folder: Path) -> list[Any]:
    """All events of a folder, by a reader that checks lengths only."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return events


async def test_event_files_hold_scalars_histograms_recipe_and_hyperparameters(tmp_path: Path) -> None:
    sink = EventFiles(tmp_path / "tb", RUN, RECIPE)
    await copy(LogInLists(log_of(2)), [sink], False, NEVER)
    sink.close()
    events = read_events(tmp_path / "tb")
    of_step = next(e for e in events if e.step == 1)
    assert of_step.wall_time == 101.0
    values = {value.tag: value for value in of_step.summary.value}
    assert values["reward_mean"].simple_value == 0.25
    assert values["ess"].simple_value == 0.5
    staleness = values["staleness"].histo
    assert (staleness.num, staleness.sum, staleness.sum_squares, staleness.min, staleness.max) == (31, 2, 4, -0.5, 2.5)
    assert list(staleness.bucket) == [30, 0, 1]
    assert list(staleness.bucket_limit) == [0.5, 1.5, 2.5]
    tags = [value.tag for event in events for value in event.summary.value]
    assert "recipe/text_summary" in tags
    assert "eval/reward" in tags
    (hyper,) = (v for e in events for v in e.summary.value if v.tag == "_hparams_/session_start_info")
    assert b"trainer.lr" in hyper.metadata.plugin_data.content
    assert b"trainer.loss" in hyper.metadata.plugin_data.content


async def test_event_files_are_gone_on_with_in_another_file(tmp_path: Path) -> None:
    """The last record was cut: its step is written again, and no other."""
    for steps, cut in ((2, 3), (4, 0)):
        sink = EventFiles(tmp_path, RUN, RECIPE)
        assert await copy(LogInLists(log_of(steps)), [sink], False, NEVER) == (3 if cut else 4)  # not what is there
        sink.close()
        if cut:
            (file,) = tmp_path.iterdir()
            file.write_bytes(file.read_bytes()[:-cut])  # in the midst of evaluation 0
    first, second = sorted(tmp_path.iterdir())
    sink = EventFiles(tmp_path, RUN, RECIPE)
    assert sorted(sink._known) == [("evaluations", 0), ("evaluations", 2), *(("steps", i) for i in range(4))]
    sink.close()
    whole = read_events(tmp_path) if first.unlink() is None else []
    steps = [e.step for e in whole if any(v.tag == "reward_mean" for v in e.summary.value)]
    evaluated = [e.step for e in whole if any(v.tag == "eval/reward" for v in e.summary.value)]
    assert (steps, evaluated) == ([2, 3], [0, 2])
    assert second.exists()


def test_a_missing_package_is_told_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(UserError, match="tensorboardX") as told:
        EventFiles(tmp_path, RUN, RECIPE)
    assert "rollstream[tensorboard]" in told.value.remedy


@pytest.fixture
async def bus() -> MemoryBus:
    bus = MemoryBus(RUN, MemoryHub())
    await bus.setup(6.0)
    return bus


async def test_a_run_writes_its_metrics_beside_and_a_resumed_one_goes_on(bus: MemoryBus, tmp_path: Path) -> None:
    """At the end everything is there, however late it came."""
    path = tmp_path / "metrics.jsonl"
    async with written_beside(bus, MetricsConfig(), tmp_path, RECIPE):
        await bus.publish(step(0))
        async with asyncio.timeout(30):
            while not path.exists() or not path.read_text():
                await asyncio.sleep(0.01)
        await bus.publish(step(1))
    async with written_beside(bus, MetricsConfig(), tmp_path, RECIPE):
        await bus.publish(evaluation(2))
    assert [(line["stream"], line["id"]) for line in lines(path)] == [
        ("steps", "0"), ("steps", "1"), ("evaluations", "2/held.py:out"),
    ]  # fmt: skip
    async with written_beside(bus, MetricsConfig(jsonl=False), tmp_path / "none", RECIPE):
        pass
    assert not (tmp_path / "none").exists()


async def test_a_sink_that_cannot_be_written_ends_no_run_and_is_tried_again(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(28, "No space left on device")]
    write = JsonLines.write

    def full_once(self: JsonLines, record: Record) -> None:
        if failures:
            raise failures.pop()
        write(self, record)

    monkeypatch.setattr(JsonLines, "write", full_once)
    async with written_beside(bus, MetricsConfig(), tmp_path, RECIPE, again_s=0.01):
        await bus.publish(step(0))
        async with asyncio.timeout(30):
            while failures or not lines(tmp_path / "metrics.jsonl"):
                await asyncio.sleep(0.01)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_what_is_no_step_and_no_evaluation_is_no_record() -> None:
    log = log_of(1)
    assert record_of(log.entries["control"][0]) is None
    key: Key = ("steps", "0")
    told = record_of(log.entries["steps"][0])
    assert told is not None
    assert told.key == key


async def test_the_documented_metrics_are_those_that_a_step_tells(recorded: Path) -> None:
    """A name that is told and not explained, or explained and not told, is a page that has rotted."""
    async with open_log(str(recorded)) as log:
        steps = [entry.message() async for entry in log.read(STEPS)]
    told = [set(step.metrics) for step in steps if isinstance(step, StepDone)]
    assert told
    assert [name for name in set().union(*told) if described(name) is None] == []
    always = {metric.name for metric in METRICS if not metric.when and not metric.name.endswith("/")}
    assert [always - names for names in told] == [set()] * len(told)


def test_the_page_of_metrics_is_made_of_the_table() -> None:
    """Write `as_markdown()` between its marks again if this fails."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page.partition("<!-- table -->\n")[2].partition("<!-- end of table -->")[0] == as_markdown()
