"""Whatever a program does, it does not pass, does not get out, does not hang, and leaves nothing behind.

A grader that can be fooled is found by the model within hours: then the reward rises and nothing is learnt.
"""

import asyncio
import contextlib
import gc
import os
import secrets
import socket
import subprocess
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from actors.reward.config import RewardConfig
from actors.reward.pool import RewardPool
from actors.reward.verdict import RewardRequest, Verdict
from tests.actors.sandbox.code_rewards import CHILDREN, PROGRAMS, pool_of

# By then the pool has killed a call that hangs, and has had as long for the start of a process in its place. Alone on a
# machine no program takes longer than its test's time.
HELD_UP_S = 2 * RewardConfig().timeout_s
LOOKS = 5
FIND = """import re as _re
def find(text):
    match = _re.search('secret-[0-9a-f]{32}', str(text))
    return match and match[0]
"""
GROWTH_BYTES_MAX = 12 << 20  # of the reward processes, which have nothing else to do
OWN_GROWTH_BYTES_MAX = 4 << 20  # of what Python holds in this process: its resident memory is other tests' affair


@dataclass(frozen=True)
class Host:
    """What there is to get at, outside of the sandbox."""

    secret: str
    path: Path
    mark: Path
    port: int
    victim: subprocess.Popen[bytes]
    knocks: list[str]
    """Who came to the port."""

    def fill(self, source: str) -> str:
        places = {"path": self.path, "port": self.port, "pid": self.victim.pid, "mark": self.mark}
        for name, value in places.items():
            source = source.replace(f"<{name}>", str(value))
        return source


@pytest.fixture
async def host(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    """Everything in it is open to all users of this machine: what keeps programs out is the sandbox alone."""
    secret = f"secret-{secrets.token_hex(16)}"
    monkeypatch.setenv("ROLLSTREAM_SECRET", secret)
    knocks: list[str] = []

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocks.append(str(writer.get_extra_info("peername")))
        writer.write(secret.encode())
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(tell, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    path = Path("/var/tmp") / f"rollstream-{secret[-8:]}"
    path.write_text(secret)
    path.chmod(0o666)
    mark = path.with_suffix(".mark")
    victim = subprocess.Popen(["sleep", "300"])  # noqa: ASYNC220  # takes a millisecond
    try:
        yield Host(secret, path, mark, port, victim, knocks)
    finally:
        victim.kill()
        victim.wait(10)
        path.unlink()
        mark.unlink(missing_ok=True)
        server.close()
        await server.wait_closed()


def asked(host: Host, name: str) -> RewardRequest:
    source = host.fill(PROGRAMS[name][1])
    test = (
        {"function": "solve", "args": ["x"], "expected": host.secret}
        if "def solve" in source
        else {"stdin": "x\n", "stdout": host.secret + "\n"}
    )
    return RewardRequest(name, "solve it", f"```python\n{FIND}{source}\n```", "stop", {"tests": [test]})


async def resident_bytes() -> int:
    """Of the reward processes. The least of some looks: each fork of one looks like another until it is a sandbox."""
    return min([await asyncio.to_thread(_resident_bytes) for _ in range(LOOKS)])


def _resident_bytes() -> int:
    total = 0
    time.sleep(0.1)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "actors.reward.child" in process.cmdline():
                total += process.memory_info().rss
    return total


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def held_bytes() -> int:
    """By objects of this process, which holds the pool."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.usefixtures("traced")
async def test_no_hostile_program_passes_gets_out_or_hangs_and_memory_stays_flat(host: Host) -> None:
    """Through the real reward function, on two processes at once. Each verdict is a 0 that was earned."""
    verdicts: dict[str, Verdict] = {}
    waiting = list(PROGRAMS)
    others = set(psutil.Process().children(recursive=True))  # the victim, and what other tests have left running

    async def work(pool: RewardPool) -> None:
        while waiting:
            name = waiting.pop()
            began = time.monotonic()
            verdicts[name] = await asyncio.wait_for(pool.score(asked(host, name)), 30)
            assert time.monotonic() - began < HELD_UP_S, f"{name} held its process up"

    async with pool_of() as pool:
        await asyncio.gather(*(pool.score(asked(host, "stdout_flood")) for _ in range(CHILDREN)))
        before, held_before = await resident_bytes(), held_bytes()
        async with asyncio.TaskGroup() as group:
            for _ in range(CHILDREN):
                group.create_task(work(pool))
        after, held_after = await resident_bytes(), held_bytes()
        family = set(psutil.Process().children(recursive=True)) - others
    assert len(PROGRAMS) >= 60
    unscored = {name: verdict.detail for name, verdict in verdicts.items() if verdict.status != "scored"}
    assert unscored == {}, "a program must not get out of its 0 either"
    assert {name for name, verdict in verdicts.items() if verdict.reward != 0.0} == set()
    told = {
        name: verdict.detail
        for name, verdict in verdicts.items()
        if not verdict.parts.get(PROGRAMS[name][0], 1.0) and not verdict.parts["timeout"]  # the machine may be slow
    }
    assert told == {}, "these fail for another reason than they should"
    assert host.knocks == []
    assert not host.mark.exists()
    assert host.path.read_text() == host.secret
    assert host.victim.poll() is None
    assert after - before < GROWTH_BYTES_MAX
    assert held_after - held_before < OWN_GROWTH_BYTES_MAX
    _, left = await asyncio.to_thread(psutil.wait_procs, family, 30)
    assert left == []


async def test_the_canaries_can_be_reached_from_outside(host: Host) -> None:
    """Or their silence would prove nothing."""
    assert host.path.read_text() == os.environ["ROLLSTREAM_SECRET"] == host.secret
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
    assert (await asyncio.wait_for(reader.read(100), 30)).decode() == host.secret
    writer.close()
    assert len(host.knocks) == 1
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        assert free.getsockname()[1] != host.port
