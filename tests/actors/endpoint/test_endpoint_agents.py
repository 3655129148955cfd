"""Agents are programs of the user's: they crash, hang, print and exit, and each of it must end in one known way."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from actors.episode.config import EpisodeConfig
from actors.episode.endpoint.agents import AgentFailed, Agents
from actors.episode.endpoint.episode import check_agent
from actors.episode.endpoint.place import Place
from schemas import UserError
from tests.waiting import alive, eventually

AGENT = """
import json, os, subprocess, sys, time
print("imported")

def solve(prompt, task):
    assert json.loads(os.environ["ROLLSTREAM_TASK"]) == task == json.load(sys.stdin)
    what = prompt
    if what == "hang":
        child = subprocess.Popen(["sleep", "300"])
        open(task["pids"], "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(300)
    if what == "raise":
        print("so far")
        raise ValueError("oh no")
    if what == "exit":
        sys.exit(3)
    if what == "die":
        os.kill(os.getpid(), 9)
    if what == "text":
        return "much"
    os.environ["OPENAI_API_KEY"] += "!"  # of this child alone
    return float(len(os.environ["OPENAI_API_KEY"]))

async def later(task):
    return 0.5
"""


async def test_an_agent_is_run_to_its_end_whatever_it_does(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(AGENT)
    agents = Agents("a.py:solve", (), tmp_path)
    await agents.start()
    try:
        tasks = [agents.run({"prompt": "fine"}, "http://x", "key") for _ in range(4)]
        assert await asyncio.wait_for(asyncio.gather(*tasks), 30) == [4.0] * 4
        for what, word in {
            "raise": r"^ValueError: oh no \(a.py, line 14\)$", "exit": "exited with 3", "die": "SIGKILL",
            "text": "returned a str",
        }.items():  # fmt: skip
            with pytest.raises(AgentFailed, match=word):
                await asyncio.wait_for(agents.run({"prompt": what}, "http://x", "key"), 30)
    finally:
        await agents.close()


async def test_an_agent_that_is_cancelled_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(AGENT)
    agents = Agents("a.py:solve", (), tmp_path)
    await agents.start()
    pids = tmp_path / "pids"
    running = asyncio.create_task(agents.run({"prompt": "hang", "pids": str(pids)}, "http://x", "key"))
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        await asyncio.sleep(0.02)
        assert not running.done()
    running.cancel()
    started = [int(pid) for pid in pids.read_text().split()]
    await eventually(lambda: not any(map(alive, started)))
    pids.unlink()
    running = asyncio.create_task(agents.run({"prompt": "hang", "pids": str(pids)}, "http://x", "key"))
    while not pids.exists():
        await asyncio.sleep(0.02)
        assert not running.done()
    assert agents._process is not None
    os.kill(agents._process.pid, 9)
    with pytest.raises(AgentFailed):
        await asyncio.wait_for(running, 30)
    assert await asyncio.wait_for(agents.run({"prompt": "fine"}, "http://x", "key"), 30) == 4.0
    await agents.close()


async def test_scripts_commands_and_async_functions_are_agents_too(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(AGENT)
    script = "import json, os, sys\nif __name__ == '__main__':\n    sys.exit(json.load(sys.stdin)['prompt'])\n"
    (tmp_path / "s.py").write_text(script)
    for agent, command, reward in (
        ("a.py:later", (), 0.5),
        ("s.py", (), None),
        ("", ("sh", "-c", "grep -q : -"), None),
    ):
        agents = Agents(agent, command, tmp_path)
        await agents.start()
        assert await asyncio.wait_for(agents.run({"prompt": 0}, "http://x", "key"), 30) == reward
        if agent == "s.py":
            with pytest.raises(AgentFailed, match="exited with 7"):
                await asyncio.wait_for(agents.run({"prompt": 7}, "http://x", "key"), 30)
        await agents.close()
    for wrong in ("a.py:none", "b.py", "a.py:json"):
        with pytest.raises(UserError):
            await Agents(wrong, (), tmp_path).start()


def test_a_recipe_that_cannot_work_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for fields, word in (
        ({"agent": "none.py"}, "no file"),
        ({"command": ["no-such-program"]}, "no program"),
        ({"agent": "external", "endpoint": {"host": "0.0.0.0"}}, "token"),
    ):
        with pytest.raises(UserError, match=word):
            check_agent(EpisodeConfig.model_validate(fields), tmp_path)
    monkeypatch.setenv("ROLLSTREAM_AGENT_TOKEN", "0123456789abcdef")
    check_agent(EpisodeConfig.model_validate({"agent": "external", "endpoint": {"host": "0.0.0.0"}}), tmp_path)


async def test_a_place_is_the_same_in_every_life_and_nobody_elses_to_read(tmp_path: Path) -> None:
    class Listens:
        async def start(self, host: str, port: int) -> int:
            return port or 4711

    file = tmp_path / "endpoint.json"
    first = Place(file, 0)
    assert await first.listen(Listens(), "127.0.0.1") == 4711
    assert file.stat().st_mode & 0o777 == 0o600
    again = Place(file, 0)
    assert again.secret == first.secret
    assert await again.listen(Listens(), "127.0.0.1") == 4711
