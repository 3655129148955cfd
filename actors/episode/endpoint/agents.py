"""Managed agents: a process for each session, forked from one that has imported the agent, and killed for sure."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.episode.policy import FailedElsewhere
from schemas import UserError

START_S = 60.0
END_S = 5.0
REPLY_BYTES_MAX = 1 << 20
_ROOT = Path(__file__).resolve().parents[3]


class AgentFailed(FailedElsewhere):
    """The agent ended by an error of its own. The text says which, with the last line that it printed."""


class Agents:
    """Starts agents, each with its task, its URL and its key. `base` is the recipe's folder, in which they run."""

    def __init__(self, agent: str, command: Sequence[str], base: Path) -> None:
        self._agent = agent
        self._command = list(command)
        self._base = base
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._running: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def start(self) -> None:
        """Import the agent. Raises `UserError` if that cannot be done."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._spawn()

    async def _spawn(self) -> None:
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-u", "-m", "actors.episode.endpoint.nursery"),
            *(self._agent, json.dumps(self._command), str(self._base.resolve())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
            start_new_session=True,
            limit=REPLY_BYTES_MAX,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            process.kill()
            raise UserError(
                f"Importing the agent {self._agent} took more than {START_S:g} s.", "Do less when it is imported."
            ) from None
        told = json.loads(line) if line else {}
        if not told.get("ready"):
            await process.wait()
            message = told.get("message") or f"The process that imports the agent {self._agent} has ended."
            raise UserError(str(message), str(told.get("remedy") or "Mend what it does when it is imported."))
        self._process = process
        self._reader = asyncio.create_task(self._read(process), name="hears agents")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            told = json.loads(line)
            future = self._running.pop(told["n"], None)
            if future is not None and not future.done():
                future.set_result(told)
        await process.wait()
        for future in self._running.values():
            if not future.done():
                future.set_exception(AgentFailed("the process of the agents was killed"))
        self._running.clear()

    async def run(self, task: dict[str, Any], url: str, key: str) -> float | None:
        """Run an agent to its end; returns the reward that it gave itself. Cancelled, it is killed.

        Raises `AgentFailed`.
        """
        await self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._running[number] = future
        env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        try:
            self._say({"n": number, "env": env, "task": task})
            await self._process.stdin.drain()
            told = await future
        except (ConnectionError, RuntimeError) as error:  # uvloop answers a write to a closed pipe with the latter
            self._running.pop(number, None)
            raise AgentFailed(f"the process of the agents is gone: {error}") from None
        except asyncio.CancelledError:
            self._running.pop(number, None)
            with contextlib.suppress(Exception):
                self._say({"kill": number})
            raise
        if told["error"]:
            lines = [line.strip() for line in told["output"].splitlines() if line.strip()]
            silent = not lines or lines[-1] in told["error"]  # the traceback's last line is the error itself
            raise AgentFailed(told["error"] + ("" if silent else f"; last output: {lines[-1][:300]}"))
        return None if told["reward"] is None else float(told["reward"])

    def _say(self, line: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def close(self) -> None:
        """Kill all agents."""
        process, reader = self._process, self._reader
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        if reader is not None:
            await reader
