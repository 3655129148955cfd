"""A process that has imported the user's agent once and forks a child for each session: `python -m` this module.

Importing `openai` costs the better part of a CPU second; a fork costs milliseconds, and what a child does to its
environment, its modules or itself ends with it. Requests and replies are lines of JSON on stdin and stdout:

    <- {"ready": true}                                   or {"message": ..., "remedy": ...}
    -> {"n": 7, "env": {...}, "task": {...}}             start a session
    -> {"kill": 7}                                       end it, with all that it started
    <- {"n": 7, "reward": 1.0, "error": "", "output": "the last that it printed"}

The agent is a function of a file, a file that is run as a script, or a command that is executed. Standard library only.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import selectors
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.functions import load_function, path_of
from schemas.errors import UserError

OUTPUT_BYTES_KEPT = 2000
RESULT_BYTES_MAX = 1 << 16
ENV_BYTES_MAX = 100_000  # of one variable; the kernel takes 128 kB
PARAMETERS = ("prompt", "task")
PR_SET_PDEATHSIG = 1
NOWHERE = "http://127.0.0.1:9/v1"  # the port that discards; nobody listens there


def prepare(agent: str, command: list[str], base: Path) -> Callable[[dict[str, Any]], Any]:
    """What a child does with its task. Raises `UserError`."""
    if command:
        return lambda task: os.execvp(command[0], command)
    source, _, name = agent.rpartition(":") if ".py:" in agent or not agent.endswith(".py") else (agent, "", "")
    if not name:
        path = path_of(source, base)
        preload(path, agent)
        return lambda task: _script(path)
    function = load_function(agent, base)
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = []
    if not names or not set(names) <= set(PARAMETERS):
        raise UserError(
            f"The agent '{agent}' takes {', '.join(names) or 'nothing'}.",
            "Write it as `def solve(prompt)`, `def solve(task)` or `def solve(prompt, task)`, async if you like.",
        )
    return lambda task: _call(function, {n: task["prompt"] if n == "prompt" else task for n in names})


def preload(path: Path, agent: str) -> None:
    """Import what a script imports first, so that its children need not. Raises `UserError` if it is no Python."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"The agent '{agent}' cannot be read: {error}.", "Name a Python file of yours.") from error
    sys.path.append(str(path.parent))
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            with contextlib.suppress(Exception):  # the child will say it better
                importlib.import_module(name)


def warm() -> None:
    """Have `openai`, if the agent imports it, do once for all what it does at a first request, which goes nowhere.

    Of the 0.1 CPU seconds that a child takes until its first answer it saves two thirds.
    """
    openai: Any = sys.modules.get("openai")
    if openai is not None:
        with contextlib.suppress(Exception):
            client = openai.OpenAI(api_key="none", base_url=NOWHERE, max_retries=0, timeout=1.0)
            client.chat.completions.create(model="none", messages=[{"role": "user", "content": ""}])


def _script(path: Path) -> None:
    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")


def _call(function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    result = function(**keywords)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


# ---- a child


def _child(work: Callable[[dict[str, Any]], Any], request: dict[str, Any], result: int, output: int) -> None:
    """Everything that the forked process does. Never returns."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    task = json.dumps(request["task"], ensure_ascii=False)
    os.environ.update(request["env"])
    if len(task.encode()) <= ENV_BYTES_MAX:
        os.environ["ROLLSTREAM_TASK"] = task
    stdin = os.memfd_create("task")
    os.write(stdin, task.encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.set_inheritable(result, False)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False, buffering=1)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
    told: dict[str, Any] = {"reward": None, "error": ""}
    try:
        reward = work(request["task"])
        if isinstance(reward, bool) or not isinstance(reward, int | float | None):
            told["error"] = f"it returned a {type(reward).__name__}; an agent returns its reward, a number, or nothing"
        else:
            told["reward"] = None if reward is None else float(reward)
    except SystemExit as end:
        if end.code not in (None, 0):
            told["error"] = f"it exited with {end.code!r}"
    except BaseException as error:
        traceback.print_exc()
        told["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:1000] + _line_of(error)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os.write(result, json.dumps(told).encode())
    os._exit(0)


def _line_of(error: BaseException) -> str:
    """Where in the user's own files an error came up; empty if in none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(os.getcwd())]
    return f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""


# ---- the parent of children


@dataclass(eq=False)
class _Running:
    n: int
    pid: int
    ended: int  # readable once the process has
    result: int
    output: int
    printed: bytes = b""


class Nursery:
    """Reads requests and serves them until stdin is closed."""

    def __init__(self, work: Callable[[dict[str, Any]], Any]) -> None:
        self._work = work
        self._running: dict[int, _Running] = {}
        self._selector = selectors.DefaultSelector()
        self._asked = b""

    def serve(self) -> None:
        """Until the end."""
        self._selector.register(0, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                child = key.data
                if child is None:
                    new = os.read(0, 1 << 16)
                    if not new:
                        for running in self._running.values():
                            _kill(running.pid)
                        return
                    self._requests(new)
                elif child.n in self._running:  # it may have ended within this round
                    self._listen(child)
                    if key.fd == child.ended:
                        self._end(child)

    def _requests(self, new: bytes) -> None:
        *lines, self._asked = (self._asked + new).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "kill" not in request:
                self._start(request)
            elif request["kill"] in self._running:
                _kill(self._running[request["kill"]].pid)

    def _start(self, request: dict[str, Any]) -> None:
        result, result_end = os.pipe()
        output, output_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _child(self._work, request, result_end, output_end)
            finally:
                os._exit(1)
        os.close(result_end)
        os.close(output_end)
        os.set_blocking(result, False)
        os.set_blocking(output, False)
        child = _Running(request["n"], pid, os.pidfd_open(pid), result, output)
        self._running[child.n] = child
        self._selector.register(child.ended, selectors.EVENT_READ, child)
        self._selector.register(output, selectors.EVENT_READ, child)

    def _listen(self, child: _Running) -> None:
        """Keep the end of what it printed, so that it never waits for a reader."""
        with contextlib.suppress(BlockingIOError):
            while new := os.read(child.output, 1 << 16):
                child.printed = (child.printed + new)[-OUTPUT_BYTES_KEPT:]
            if child.output in self._selector.get_map():
                self._selector.unregister(child.output)

    def _end(self, child: _Running) -> None:
        _kill(child.pid)  # what it has left behind; while it is not waited for, its number is nobody else's
        _, status = os.waitpid(child.pid, 0)
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(child.result, RESULT_BYTES_MAX)
        del self._running[child.n]
        for end in (child.ended, child.output):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        for end in (child.ended, child.output, child.result):
            os.close(end)
        told = json.loads(said) if said else {"reward": None, "error": _how(os.waitstatus_to_exitcode(status))}
        reply({"n": child.n, **told, "output": child.printed.decode(errors="replace")})


def _how(code: int) -> str:
    """How a process ended that said nothing, such as a command; empty if well."""
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it exited with status {code}" if code else ""


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # before its first line it has no group of its own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def reply(line: dict[str, Any]) -> None:
    """Tell the parent."""
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(REPLIES, data) :]


REPLIES = 1


def main() -> None:
    """The arguments are the agent, the command as JSON, and the recipe's folder."""
    global REPLIES
    agent, command, base = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    REPLIES = os.dup(1)  # what the agent's modules print when they are imported is no reply
    os.set_inheritable(REPLIES, False)
    os.dup2(2, 1)
    os.chdir(base)
    try:
        work = prepare(agent, json.loads(command), Path(base))
    except UserError as error:
        reply({"message": error.message, "remedy": error.remedy})
        return
    warm()
    gc.collect()
    gc.freeze()
    reply({"ready": True})
    Nursery(work).serve()


if __name__ == "__main__":
    main()
