"""A function that ends or blocks its process must cost its own sample only: who did it is known, told, and bounded."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.episode import watchdog
from actors.episode.actor import EpisodeWorker
from actors.episode.builtin import Function
from actors.episode.config import EpisodeConfig
from actors.episode.deaths import DEATHS_FIRST_MAX, DEATHS_MAX, Deaths
from actors.episode.running import Marked, Running, left_by
from bus.memory import MemoryBus, MemoryHub
from bus.port import Bus
from bus.reading import read_to_end
from bus.table import DROPPED, NOTES, ROLLOUT_WORKERS, ROLLOUTS
from schemas import Control, Note, Prompt, Rollout, UserError
from tests.actors.episode.test_episode_worker import Digits, at_work, first, model

PROMPT = Prompt(group_id=1, index=0, group_size=1, prompt="2", task={}, seed=7, min_version=0)
ROOT = Path(__file__).parents[3]


@pytest.fixture
async def bus() -> Bus:
    bus = MemoryBus("run", MemoryHub())
    await bus.setup(ack_wait_s=0.3)
    return bus


def prompt(group: int) -> Prompt:
    return dataclasses.replace(PROMPT, group_id=group)


def fallen(path: Path, *groups: int, at: int | None = None) -> None:
    """A worker died there while these groups' episodes ran, and was at one of them."""
    running = Running(path, 8)
    with contextlib.ExitStack() as stack:
        slots = {group: stack.enter_context(running.episode(prompt(group))) for group in groups}
        if at is not None:
            running.at(slots[at])
        record = path.read_bytes()
    path.write_bytes(record)


async def lived(bus: Bus, path: Path, died: str = "ended with status 3") -> Deaths:
    """The next life."""
    deaths = Deaths(bus, "function task.py:episode", 8, path, died)
    await deaths.start()
    return deaths


DIES = """
import asyncio, os, sys
from pathlib import Path
from actors.episode.running import Marked, Running
from schemas import Prompt

async def waits():
    await asyncio.sleep(60)

async def exits():
    await asyncio.sleep(0.01)
    os._exit(0)

async def main():
    running, tasks = Running(Path(sys.argv[1]), 4), []
    for group, work in enumerate((waits, exits, waits)):
        prompt = Prompt(group_id=group, index=3, group_size=4, prompt="2", task={}, seed=7, min_version=0)
        tasks.append(asyncio.ensure_future(run(running, prompt, work)))
    await asyncio.sleep(60)

async def run(running, prompt, work):
    with running.episode(prompt) as slot:
        await Marked(running, slot, work())

asyncio.run(main())
"""


def script(text: str, *arguments: object) -> int:
    """Run a program of its own; its exit status."""
    return subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=30
    ).returncode


def test_a_process_that_is_ended_in_the_midst_of_an_episode_leaves_whose_it_was(tmp_path: Path) -> None:
    assert script(DIES, tmp_path / "record") == 0
    left = left_by(tmp_path / "record")
    assert left is not None
    assert (left.culprit, sorted(left.running)) == ("1-3", ["0-3", "1-3", "2-3"])


def test_a_worker_that_ends_in_order_leaves_nothing_and_one_with_a_single_episode_leaves_that(tmp_path: Path) -> None:
    path = tmp_path / "record"
    Running(path, 4).close()
    assert left_by(path) is None
    path.write_bytes(b"cut")
    assert left_by(path) is None
    fallen(path, 5)
    assert getattr(left_by(path), "culprit", "") == "5-0"
    fallen(path, 5, 6)
    assert getattr(left_by(path), "culprit", "") is None


async def test_a_marked_coroutine_is_marked_whenever_it_is_at_work_and_else_as_any_other() -> None:
    running = Running(None, 2)
    seen: list[str | None] = []

    async def work(end: Any) -> int:
        seen.append(running.now)
        with contextlib.suppress(KeyError):
            await asyncio.wait_for(asyncio.get_running_loop().create_future(), 0.001 if end != "cancel" else 60)
        seen.append(running.now)
        if end == "fail":
            raise ValueError("odd")
        return 5

    with running.episode(PROMPT) as slot:
        for end, error in ((None, TimeoutError), ("cancel", asyncio.CancelledError)):
            task = asyncio.ensure_future(_awaited(Marked(running, slot, work(end))))
            await asyncio.sleep(0)
            assert running.now is None
            if end == "cancel":
                await asyncio.sleep(0)
                task.cancel()
            with pytest.raises(error):
                await task
            assert running.now is None

        async def quick() -> int:
            await asyncio.sleep(0)
            seen.append(running.now)
            return 5

        assert await Marked(running, slot, quick()) == 5
    assert set(seen) == {"1-0"}


async def _awaited(marked: Marked[int]) -> int:
    return await marked


async def test_a_sample_whose_worker_died_of_it_again_and_again_is_dropped_with_how_and_the_others_go_on(
    bus: Bus, tmp_path: Path
) -> None:
    path = tmp_path / "record"
    await bus.publish(prompt(1))
    await bus.publish(prompt(2))
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        for delivery in await subscription.fetch(2, 1.0):
            await delivery.nak()  # both were in hand of a worker that died
    for _ in range(DEATHS_MAX):
        fallen(path, 1, 2, at=1)
        deaths = await lived(bus, path, "crashed with SIGSEGV")
    assert [await deaths.of("1-0"), await deaths.of("2-0")] == [["crashed with SIGSEGV"] * DEATHS_MAX, []]

    async def episode(prompt: Prompt, policy: Any) -> float:
        await policy.chat().ask()
        return 1.0

    worker = EpisodeWorker(bus, EpisodeConfig(), Function(episode, {}), Digits(), 8, "episode-0", deaths)
    async with at_work(model(bus)), at_work(worker.run(asyncio.Event())):
        dropped = await first(bus, DROPPED)
        rollout = await first(bus, ROLLOUTS)
    assert (dropped.sample_id, dropped.reason) == ("1-0", "error")
    assert "its worker crashed with SIGSEGV while it ran, 3 times in a row" in dropped.detail
    assert isinstance(rollout, Rollout)
    assert rollout.sample_id == "2-0"


async def test_an_episode_may_still_clean_up_when_its_worker_has_left(bus: Bus, tmp_path: Path) -> None:
    """It closes a connection, say: that was taken for a failure, since the record of the worker was closed already."""
    begun, closed, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def episode(prompt: Prompt, policy: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            closed.set()

    deaths = Deaths(bus, "function task.py:episode", 128, tmp_path / "record")
    worker = EpisodeWorker(bus, EpisodeConfig(), Function(episode, {}), Digits(), 8, "episode-0", deaths)
    await bus.publish(PROMPT)
    with capture_logs() as logs:
        working = asyncio.create_task(worker.run(stop))
        await asyncio.wait_for(begun.wait(), 30)
        stop.set()
        await asyncio.wait_for(working, 30)
        assert left_by(tmp_path / "record") is None
        await asyncio.wait_for(closed.wait(), 5)
    assert "episode_failed" not in [line["event"] for line in logs]


async def test_a_worker_that_was_stopped_in_order_blames_nobody(bus: Bus, tmp_path: Path) -> None:
    fallen(tmp_path / "record", 1, at=1)
    await lived(bus, tmp_path / "record", died="")
    assert (await bus.info(NOTES)).messages == 0


async def test_where_several_may_have_done_it_half_as_many_run_next_and_twice_as_many_when_they_survive(
    bus: Bus, tmp_path: Path
) -> None:
    fallen(tmp_path / "record", *range(6))
    deaths = await lived(bus, tmp_path / "record")
    assert deaths.most == 3
    assert (await bus.info(NOTES)).messages == 0
    most = []
    for _ in range(9):
        async with deaths.beside_others():
            most.append(deaths.most)
    assert most == [3, 3, 3, 6, 6, 6, 6, 6, 6]
    assert deaths.most == 8


async def test_one_that_ended_a_worker_waits_until_the_others_have_ended(bus: Bus, tmp_path: Path) -> None:
    deaths = await lived(bus, tmp_path / "record")
    began = asyncio.Event()

    async def suspect() -> None:
        async with deaths.in_quiet():
            began.set()

    async with deaths.beside_others():
        task = asyncio.ensure_future(suspect())
        await asyncio.sleep(0.12)
        assert not began.is_set()
    await asyncio.wait_for(task, 5.0)


@pytest.mark.parametrize("finished", [False, True])
async def test_a_function_that_only_ever_ends_its_process_ends_the_run(
    bus: Bus, tmp_path: Path, finished: bool
) -> None:
    if finished:
        await bus.publish(
            Rollout(
                group_id=9, index=0, group_size=1, prompt="2", task={}, prompt_tokens=np.array([1]),
                tokens=np.array([2]), logprobs=np.array([-1.0]), segments=((0, 1),), finish="stop", text="2",
                worker="episode-0",
            )
        )  # fmt: skip
    for group in range(DEATHS_FIRST_MAX - 1):
        fallen(tmp_path / "record", group, at=group)
        await lived(bus, tmp_path / "record")
    fallen(tmp_path / "record", 99, at=99)
    if finished:
        await lived(bus, tmp_path / "record")
        return
    with pytest.raises(UserError, match=r"8 times, and was never finished. .* ended with status 3, while sample 99-0"):
        await lived(bus, tmp_path / "record")


async def test_deaths_of_before_the_run_was_started_again_are_forgotten(bus: Bus, tmp_path: Path) -> None:
    """By then somebody has mended the function; the samples that it ended shall be tried again, and are kept."""
    record = tmp_path / "record"
    for _ in range(DEATHS_MAX):
        fallen(record, 7, at=7)
        await lived(bus, record)
    for group in range(DEATHS_FIRST_MAX - 1 - DEATHS_MAX):
        fallen(record, group, at=group)
        await lived(bus, record)
    assert len(await (await lived(bus, record)).of("7-0")) == DEATHS_MAX
    await bus.publish(Control(action="start", nonce="again"))
    fallen(record, 7, at=7)
    deaths = await lived(bus, record)
    assert len(await deaths.of("7-0")) == 1
    notes = [entry.message() async for entry in read_to_end(bus, NOTES)]
    assert [note.number for note in notes if isinstance(note, Note) and note.group_id == 7] == [0, 1, 2, 3]


async def test_a_note_of_an_agent_is_no_death(bus: Bus) -> None:
    await bus.publish(Note(group_id=1, index=0, number=0, kind="taken"))
    assert await Deaths(bus, "agent external", 8).of("1-0") == []


# ---- calls that block


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_S", 0.02)
    monkeypatch.setattr(watchdog, "NOTICED_S", 0.1)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("how", ["sleeps", "spins", "swallows", "in a task"])
async def test_a_call_that_blocks_is_told_with_its_line_and_interrupted_and_the_others_go_on(
    bus: Bus, how: str
) -> None:
    def block() -> None:
        if how == "spins":
            while True:
                pass
        try:
            time.sleep(1000)
        except Exception:
            if how != "swallows":
                raise
            time.sleep(1000)

    async def blocking() -> None:
        block()

    async def episode(prompt: Prompt, policy: Any) -> float:
        await policy.chat().ask()
        if prompt.group_id == 1 and how == "in a task":
            await asyncio.gather(blocking())
        elif prompt.group_id == 1:
            block()
        return 1.0

    config = EpisodeConfig(held_up_s=0.3, retries=0)
    worker = EpisodeWorker(bus, config, Function(episode, {}), Digits(), 8, "episode-0")
    await bus.publish(prompt(1))
    await bus.publish(prompt(2))
    with capture_logs() as logs:
        async with at_work(model(bus)), at_work(worker.run(asyncio.Event())):
            dropped = await first(bus, DROPPED)
            rollout = await first(bus, ROLLOUTS)
    assert (dropped.sample_id, dropped.reason, rollout.sample_id) == ("1-0", "timeout", "2-0")
    assert "it held up all other episodes for 0 s at" in dropped.detail
    assert "test_deaths.py, line" in dropped.detail
    assert any(line["event"] == "episode_blocks" and "test_deaths.py, line" in line["where"] for line in logs)


HEEDS_NOTHING = """
import asyncio, signal, sys, time
from pathlib import Path
from actors.episode import watchdog
from actors.episode.running import Running
from schemas import Prompt

watchdog.LOOK_S, watchdog.NOTICED_S, watchdog.GRACE_S = 0.02, 0.1, 0.1

async def main():
    running = Running(Path(sys.argv[1]), 1)
    prompt = Prompt(group_id=4, index=0, group_size=1, prompt="2", task={}, seed=7, min_version=0)
    with running.episode(prompt) as slot:
        running.at(slot)
        with watchdog.Watchdog(running, 0.2, "episode-0"):
            await asyncio.sleep(0.1)
            signal.pthread_sigmask(signal.SIG_BLOCK, [watchdog.SIGNAL])  # as compiled code that does not look
            sys.path.insert(0, sys.argv[2])
            __import__("task").block()

asyncio.run(main())
"""


def test_a_call_that_heeds_no_interruption_is_ended_with_the_process_which_says_why(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import time\n\ndef block():\n    time.sleep(25)\n")
    assert script(HEEDS_NOTHING, tmp_path / "record", tmp_path) == watchdog.EXIT_HELD_UP
    left = left_by(tmp_path / "record")
    assert left is not None
    assert left.culprit == "4-0"
    assert left.words.startswith("was ended, since it held up all other episodes for 0 s at")
    assert left.words.endswith("task.py, line 4")


@pytest.mark.usefixtures("_quick")
async def test_our_own_slow_calls_are_told_and_never_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "their_line", lambda _: "")
    with capture_logs() as logs, watchdog.Watchdog(Running(None, 1), 0.15, "episode-0"):
        await asyncio.sleep(0.1)
        time.sleep(0.5)  # noqa: ASYNC251  (that is what is watched for)
        await asyncio.sleep(0.1)
    assert [line["event"] for line in logs] == ["worker_blocked"]
