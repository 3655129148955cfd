"""The sandbox as its callers see it: bounded, killable, and refused with the remedy where it cannot be had."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.reward.code import Options, load
from actors.reward.sandbox import Call, Limits, Sandbox, SandboxLost
from actors.reward.sandbox import launch as launching
from actors.reward.sandbox.seccomp import FORBIDDEN, SIGNALS, bpf, bpf_without_sigkill
from actors.reward.verifiers import Setting
from schemas import UserError
from tests.actors.sandbox.code_rewards import PROGRAMS
from tests.actors.sandbox.hostile_hidden import HIDDEN


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Limits(time_s=20), children=2) as made:
        yield made


async def test_a_program_is_run_from_a_coroutine(sandbox: Sandbox) -> None:
    result = await sandbox.run("import sys\nprint(int(input()) + 1)\nprint('!', file=sys.stderr)", "41")
    assert (result.status, result.stdout, result.stderr) == ("ok", "42\n", "!\n")
    assert 0 < result.seconds < 20


async def test_a_function_gives_its_value_as_text(sandbox: Sandbox) -> None:
    result = await sandbox.run("def add(a, b): return {'sum': a + b}", call=Call("add", "[2, 3]"))
    assert (result.status, result.value) == ("ok", '{"sum": 5}')


async def test_the_loop_turns_while_programs_run_and_more_wait(sandbox: Sandbox) -> None:
    """Two at once, the third behind them."""
    began, turns = time.monotonic(), 0
    runs = [asyncio.create_task(sandbox.run("import time; time.sleep(0.4)")) for _ in range(3)]
    while not all(run.done() for run in runs):
        await asyncio.sleep(0.01)
        turns += 1
    assert time.monotonic() - began >= 0.8
    assert turns > 8  # a loop that is held up turns three times
    assert [run.result().status for run in runs] == ["ok"] * 3


async def test_a_run_that_is_cancelled_is_killed(sandbox: Sandbox) -> None:
    began = time.monotonic()
    run = asyncio.create_task(sandbox.run("while True: pass"))
    await asyncio.sleep(0.2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert time.monotonic() - began < 15  # of 20
    assert (await sandbox.run("print(1)")).stdout == "1\n"


async def test_a_run_that_waits_for_a_place_can_be_cancelled() -> None:
    with Sandbox(Limits(time_s=20), children=1) as sandbox, sandbox.borrow():
        run = asyncio.create_task(sandbox.run("print(1)"))
        await asyncio.sleep(0.1)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(run, 30)


async def test_time_counts_from_the_programs_own_start(sandbox: Sandbox) -> None:
    """Waiting for a place, or for a sandbox, is not the program's fault."""
    limits = Limits(time_s=2.0)
    busy = [asyncio.create_task(sandbox.run("import time; time.sleep(2.5)")) for _ in range(2)]
    await asyncio.sleep(0.05)
    result = await sandbox.run("import time; time.sleep(0.2); print('in time')", limits=limits)
    assert result.stdout == "in time\n"
    await asyncio.gather(*busy)


@pytest.mark.parametrize(
    "name",
    [
        *("memory_bomb_of_lists", "memory_bomb_of_many", "shared_memory_of_many", "file_flood", "stdout_flood"),
        *(name for name, status, _ in HIDDEN if status == "memory"),
    ],
)
def test_floods_end_for_what_they_are_and_long_before_their_time(sandbox: Sandbox, name: str) -> None:
    """The hostile programs have so little time that one of them may run out of it first."""
    status, source = PROGRAMS[name]
    result = sandbox.run_blocking(source, limits=Limits(time_s=20, memory_bytes=256 << 20))
    assert (result.status, result.seconds < 15) == (status, True)


async def test_what_was_printed_before_the_end_is_kept(sandbox: Sandbox) -> None:
    """A tool shows it to the model."""
    late = await sandbox.run("print('begun', flush=True)\nwhile True: pass", limits=Limits(time_s=2.0))
    raised = await sandbox.run("print('begun')\n1 / 0")
    assert (late.status, late.stdout, raised.status, raised.stdout) == ("timeout", "begun\n", "failed", "begun\n")
    assert raised.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_runs_of_one_program_share_a_sandbox_until_something_is_left_in_it(sandbox: Sandbox) -> None:
    """Or a hundred tests would start a hundred sandboxes; but no test sees what another one wrote."""
    with sandbox.borrow() as box:
        child = None
        for number in range(3):
            assert box.run("print(input())", str(number)).stdout == f"{number}\n"
            assert child in (None, box._child)
            child = box._child
        assert child is not None
        assert box.run("open('/tmp/x', 'w')").status == "ok"
        assert box._child is None
        assert box.run("import os; print(os.listdir('/tmp'))").stdout == "[]\n"


@pytest.mark.parametrize(
    ("leave", "look"),
    [
        ("os.utime('/tmp', (12345, 54321))", "print(os.stat('/tmp').st_mtime == 54321)"),
        ("os.chmod('/tmp', 0o711)", "print(os.stat('/tmp').st_mode & 0o7777 == 0o711)"),
        ("os.setxattr('/tmp', 'user.x', b'1')", "print(bool(os.listxattr('/tmp')))"),
    ],
)
def test_nothing_is_passed_on_by_attributes_of_what_stays(sandbox: Sandbox, leave: str, look: str) -> None:
    """A folder has a mode, times and attributes, which are a message, too."""
    with sandbox.borrow() as box:
        assert box.run(f"import os\ntry: {leave}\nexcept OSError: pass").status == "ok"
        assert box.run(f"import os\ntry: {look}\nexcept OSError: print(False)").stdout == "False\n"


def test_closing_kills_what_runs() -> None:
    sandbox = Sandbox(Limits(time_s=30), children=1)
    sandbox.start()

    async def closed() -> None:
        run = asyncio.create_task(sandbox.run("while True: pass"))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(sandbox.close)
        with pytest.raises(SandboxLost):
            await run

    began = time.monotonic()
    asyncio.run(closed())
    assert time.monotonic() - began < 25  # of 30
    with pytest.raises(SandboxLost):
        sandbox.run_blocking("print(1)")


def test_a_machine_without_bubblewrap_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no `bwrap` on this machine") as caught:
        load(Options(), Setting())
    assert "apt-get install bubblewrap" in caught.value.remedy


def test_a_machine_that_forbids_namespaces_is_told_how_to_allow_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Never run without: the program would be run on the host."""
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    tmp_path.chmod(0o755)
    broken.chmod(0o755)
    monkeypatch.setattr(launching, "find_bwrap", lambda: str(_reachable(broken)))
    with pytest.raises(UserError, match="No permissions to create new namespace") as caught:
        Sandbox().start()
    assert "user namespaces" in caught.value.remedy


def _reachable(program: Path) -> Path:
    """pytest's folders are closed to others, as whom sandboxes are started if we are root."""
    for folder in program.parents:
        if os.stat(folder).st_uid == os.getuid() and str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    return program


def test_limits_that_are_too_small_are_named() -> None:
    with pytest.raises(UserError, match="fails with these limits") as caught:
        Sandbox(Limits(memory_bytes=1 << 20)).start()
    assert "Raise the limits" in caught.value.remedy
    with pytest.raises(ValueError, match="time_s"):
        Limits(time_s=0)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filters_end_with_what_is_allowed_and_know_every_call(machine: str) -> None:
    for program, calls in ((bpf(machine), 2 * len(FORBIDDEN)), (bpf_without_sigkill(machine), 4 * len(SIGNALS))):
        assert len(program) % 8 == 0
        assert len(program) // 8 > calls
        assert program[-8:] == bytes([6, 0, 0, 0, 0, 0, 0xFF, 0x7F])


@pytest.mark.parametrize("filter_of", [bpf, bpf_without_sigkill])
def test_the_filters_refuse_a_machine_that_they_do_not_know(filter_of: Callable[[str], bytes]) -> None:
    with pytest.raises(UserError, match="system calls of riscv64"):
        filter_of("riscv64")


def test_what_a_sandbox_is_given_needs_no_pipe_that_may_hold_too_little() -> None:
    """A program had used up the pipes of its user, who was ours: the thread that starts sandboxes waited for ever."""
    content = os.urandom(4 << 20)  # more than any pipe holds
    with launching._file_with(content) as fd, open(os.dup(fd), "rb") as file:
        assert file.read() == content


def test_a_machine_that_allows_less_than_the_limits_is_taken_as_it_is() -> None:
    """Its own limits hold then; nobody may raise them, and each program failed."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (500, 500))\n"
        "from actors.reward.sandbox import Limits, Sandbox\n"
        "with Sandbox(Limits(processes=1000)) as sandbox: print(sandbox.run_blocking('print(1)').status)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr
