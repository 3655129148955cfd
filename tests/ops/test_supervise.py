"""Who is started again, how soon, and when that is enough: a crash loop must end a run, kills from outside must not."""

import asyncio
import os
import signal
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.episode.running import Running
from ops import host, supervise
from ops.host import ProcessSpec
from ops.supervise import FAILURES_MAX, FORK_SERVER_LOST, ORDERLY, Supervisor, fork_server
from schemas import Prompt, UserError

EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, EXIT_STOPPED = (
    ORDERLY + status for status in (host.EXIT_DONE, host.EXIT_FAILED, host.EXIT_USER_ERROR, host.EXIT_STOPPED)
)
TRAINER = ProcessSpec((("trainer", "trainer"),), "run", "", Path("run"), "")
PIDS = iter(range(100_000, 200_000))


class FakeProcess:
    """Ends when it is told to, or is killed."""

    def __init__(self) -> None:
        self.pid = next(PIDS)
        self.exitcode: int | None = None

    def kill(self) -> None:
        self.exitcode = -signal.SIGKILL

    terminate = kill


class Watched:
    """A supervisor of one process, on fakes; `spawned` are those that it started, the newest last."""

    def __init__(self, hung_after_s: float = 0.0) -> None:
        self.supervisor = Supervisor(heavy=False, hung_after_s=hung_after_s)
        self.spawned: list[FakeProcess] = []
        self.died = ""  # how the one before the newest ended, as the newest is told

    async def start(self, monkeypatch: pytest.MonkeyPatch, failures: int = 0, spec: ProcessSpec = TRAINER) -> "Watched":
        """Start it; the fork server fails so many times before."""
        left = [OSError("no fork server")] * failures

        async def forked(context: object, life: object, args: tuple[ProcessSpec], *_: object) -> FakeProcess:
            if left:
                raise left.pop()
            self.died = args[0].died
            self.spawned.append(FakeProcess())
            return self.spawned[-1]

        monkeypatch.setattr(supervise, "forked", forked)
        await self.supervisor.start(spec)
        self.watching = asyncio.create_task(self.supervisor.watch())
        return self

    def beat(self) -> None:
        for pid in (os.getpid(), self.spawned[-1].pid):
            self.supervisor.heard({"process": f"{socket.gethostname()}:{pid}"})

    async def ends_with(self, status: int) -> bool:
        """End the process; whether another one was started, and not the run ended."""
        count = len(self.spawned)
        self.spawned[-1].exitcode = status
        async with asyncio.timeout(30):
            while len(self.spawned) == count and not self.watching.done():
                await asyncio.sleep(0.001)
        return not self.watching.done()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "WATCH_S", 0.001)
    monkeypatch.setattr(supervise, "BACKOFF_S", 0.0005)
    monkeypatch.setattr(supervise, "KILLED_BACKOFF_S", 0.0005)


@pytest.mark.parametrize("status", [0, 1, 2, 3, EXIT_FAILED, -signal.SIGSEGV])
async def test_a_process_that_crashes_at_once_again_and_again_ends_the_run(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = await Watched().start(monkeypatch)
    for _ in range(FAILURES_MAX - 1):
        watched.beat()
        assert await watched.ends_with(status)
    assert not await watched.ends_with(status)
    with pytest.raises(UserError, match=f"trainer .*, {FAILURES_MAX} times in a row"):
        await watched.watching


async def test_the_run_goes_on_without_an_evaluator_that_crashes_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for it. Alone, as `up` starts it, it has nothing to go on without it."""
    watched = await Watched().start(monkeypatch)
    trainer = watched.spawned[-1]
    await watched.supervisor.start(ProcessSpec((("evaluator", "evaluator-0"),), "run", "", Path("run"), ""))
    for _ in range(FAILURES_MAX - 1):
        watched.beat()
        assert await watched.ends_with(1)
    watched.spawned[-1].exitcode = 1
    await asyncio.sleep(0.01)
    assert not watched.watching.done()
    trainer.exitcode = EXIT_DONE
    await watched.watching

    alone = Supervisor(heavy=False)
    spec = ProcessSpec((("evaluator", "evaluator-1"),), "run", "", Path("nowhere"), "")
    await alone.start(spec)
    watched.spawned[-1].exitcode = EXIT_USER_ERROR
    with pytest.raises(UserError, match="evaluator-1 stopped"):
        await alone.watch()


@pytest.mark.parametrize("status", [0, 3, EXIT_FAILED, EXIT_STOPPED, -signal.SIGKILL])
async def test_an_evaluator_that_dies_when_all_others_are_done_does_not_hold_up_the_end(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that died late in each of its lives, or was killed, was started again for ever, and the run never ended."""
    watched = await Watched().start(monkeypatch)
    trainer = watched.spawned[-1]
    await watched.supervisor.start(ProcessSpec((("evaluator", "evaluator-0"),), "run", "", Path("run"), ""))
    told: list[str] = []
    watched.supervisor.note = told.append
    monkeypatch.setattr(supervise, "STEADY_S", 0.0)
    for _ in range(FAILURES_MAX + 1):
        watched.beat()
        assert await watched.ends_with(status)
    trainer.exitcode = EXIT_DONE
    await asyncio.sleep(0.01)
    assert not watched.watching.done()  # its last evaluation is waited for
    watched.beat()
    assert not await watched.ends_with(status)
    await watched.watching
    assert told[-1].endswith("when all others were done. It is not started again. The run goes on without it")


async def test_episodes_that_end_their_worker_again_and_again_end_no_run_and_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker bounds that itself, sample by sample. An error of our own code is counted as ever."""
    notes: list[str] = []
    watched = Watched()
    watched.supervisor.note = notes.append
    spec = ProcessSpec((("episode", "episode-0"),), "run", "", tmp_path, "")
    await watched.start(monkeypatch, spec=spec)
    spec.record_file.parent.mkdir()
    running = Running(spec.record_file, 2)
    prompt = Prompt(group_id=3, index=1, group_size=2, prompt="2", task={}, seed=7, min_version=0)
    with running.episode(prompt):
        for status in (0, 3, -signal.SIGSEGV, 1) * FAILURES_MAX:
            watched.beat()
            assert await watched.ends_with(status)
        assert notes[:2] == [
            "episode-0 ended with status 0 while sample 3-1 ran; it is started again",
            "episode-0 ended with status 3 while sample 3-1 ran; it is started again",
        ]
        assert watched.died == "ended with status 1"
        watched.beat()
        assert await watched.ends_with(EXIT_STOPPED)
        assert watched.died == ""
        for _ in range(FAILURES_MAX - 1):
            watched.beat()
            assert await watched.ends_with(EXIT_FAILED)
        assert not await watched.ends_with(EXIT_FAILED)
    with pytest.raises(UserError, match="ended by an error, 8 times in a row"):
        await watched.watching


@pytest.mark.parametrize("status", [-signal.SIGKILL, FORK_SERVER_LOST])
async def test_kills_from_outside_never_end_the_run_and_the_next_start_is_at_once(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say nothing about the next time; a pause that doubles would cost more than the kills."""
    monkeypatch.setattr(supervise, "KILLED_BACKOFF_S", 60.0)
    watched = await Watched().start(monkeypatch)
    for _ in range(4 * FAILURES_MAX):
        watched.beat()
        assert await watched.ends_with(status)
    watched.spawned[-1].exitcode = EXIT_DONE
    await watched.watching


async def test_a_process_that_is_killed_before_it_begins_again_and_again_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that does not suffice for loading will not suffice the next time."""
    watched = await Watched().start(monkeypatch)
    for _ in range(FAILURES_MAX - 1):
        assert await watched.ends_with(-signal.SIGKILL)
    assert not await watched.ends_with(-signal.SIGKILL)
    with pytest.raises(UserError, match="killed by SIGKILL") as caught:
        await watched.watching
    assert "memory" in caught.value.remedy


@pytest.mark.parametrize("too_many", [0, 1])
def test_a_temporary_folder_too_deep_for_a_socket_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, too_many: int
) -> None:
    """Clusters give each job a deep one; the remedy was to look for memory."""
    folder = tmp_path / ("x" * (supervise.TEMPORARY_PATH_MAX + too_many - len(str(tmp_path)) - 1))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if too_many:
        with pytest.raises(UserError, match="too many for a socket") as told:
            fork_server()
        assert "TMPDIR" in str(told.value.remedy)
    else:
        fork_server()
        (folder / "pymp-12345678").mkdir()
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(folder / "pymp-12345678" / "listener-12345678"))


async def test_a_start_that_the_fork_server_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be killed as any other, and whoever is being started then has done nothing wrong."""
    watched = await Watched().start(monkeypatch, failures=FAILURES_MAX - 1)
    async with asyncio.timeout(30):
        while not watched.spawned:
            await asyncio.sleep(0.001)
    watched.spawned[-1].exitcode = EXIT_DONE
    await watched.watching
    hopeless = await Watched().start(monkeypatch, failures=FAILURES_MAX)
    with pytest.raises(UserError, match="cannot be started"):
        await hopeless.watching


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The supervisor's seconds, at index 0."""
    now = [1000.0]
    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def silence(watched: Watched, clock: list[float], seconds: float, hears_itself: bool = True) -> None:
    """Time passes, a second at a time, and the process does not beat."""
    for _ in range(round(seconds)):
        clock[0] += 1.0
        if hears_itself:
            watched.supervisor.heard({"process": f"{socket.gethostname()}:{os.getpid()}"})
        watched.supervisor.watch_for_hung()


async def test_a_process_that_has_beaten_and_falls_silent_is_killed_and_started_again(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = await Watched(hung_after_s=5.0).start(monkeypatch)
    watched.beat()
    watched.supervisor.watch_for_hung()
    silence(watched, clock, 5)
    hung = watched.spawned[-1]
    assert hung.exitcode is None
    watched.beat()
    silence(watched, clock, 5)
    assert hung.exitcode is None
    silence(watched, clock, 1)
    assert hung.exitcode == -signal.SIGKILL
    async with asyncio.timeout(30):
        while watched.spawned[-1] is hung:
            await asyncio.sleep(0.001)
            clock[0] += 0.001
    watched.watching.cancel()


async def test_silence_says_nothing_while_nobody_can_be_heard(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is down, or a launcher that was itself stopped, must not cost the actors their lives."""
    watched = await Watched(hung_after_s=5.0).start(monkeypatch)
    watched.beat()
    watched.supervisor.watch_for_hung()
    silence(watched, clock, 60, hears_itself=False)
    clock[0] += 60.0  # the launcher was stopped
    silence(watched, clock, 4)
    assert watched.spawned[-1].exitcode is None
    watched.watching.cancel()


async def test_a_process_may_take_its_time_to_start(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a large model takes minutes, in which no beat comes."""
    watched = await Watched(hung_after_s=5.0).start(monkeypatch)
    watched.supervisor.watch_for_hung()
    silence(watched, clock, supervise.STARTING_S - 1)
    assert watched.spawned[-1].exitcode is None
    silence(watched, clock, 3)
    assert watched.spawned[-1].exitcode is not None
    watched.watching.cancel()


async def test_a_process_that_is_to_leave_is_asked_once_and_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on; its name is free once it has ended, however it did."""
    watched = await Watched().start(monkeypatch)
    supervisor = watched.supervisor
    await supervisor.start(ProcessSpec((("rollout", "rollout-0"),), "run", "", Path("run"), ""))
    worker = watched.spawned[-1]
    monkeypatch.setattr(worker, "terminate", lambda: None)  # it still hands over
    supervisor.leave("rollout-0")
    await asyncio.sleep(0.02)
    assert supervisor.leaving == {"rollout-0"}
    assert "rollout-0" in supervisor.pids
    worker.exitcode = EXIT_STOPPED
    async with asyncio.timeout(30):
        while supervisor.names != {"trainer"}:
            await asyncio.sleep(0.001)
    assert len(watched.spawned) == 2
    assert not watched.watching.done()
    watched.spawned[0].exitcode = EXIT_DONE
    await asyncio.wait_for(watched.watching, 30)


async def test_a_process_that_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "DRAIN_S", 0.01)
    watched = await Watched().start(monkeypatch)
    await watched.supervisor.start(ProcessSpec((("rollout", "rollout-0"),), "run", "", Path("run"), ""))
    monkeypatch.setattr(watched.spawned[-1], "terminate", lambda: None)
    watched.supervisor.leave("rollout-0")
    async with asyncio.timeout(30):
        while watched.supervisor.names != {"trainer"}:
            await asyncio.sleep(0.001)
    assert watched.spawned[-1].exitcode == -signal.SIGKILL
    watched.watching.cancel()
