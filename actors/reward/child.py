"""The reward process: loads one function and answers calls of it, one after another, over its stdin and stdout.

`python -m actors.reward.child FUNCTION BASE PARENT_PID`, started by `actors.reward.process`. It is two processes:

- the *guard* runs none of the user's code. It waits, and when told to (SIGTERM), when the parent dies, or when the
  worker does, it kills and reaps the worker and all that this started, even what fled into a session of its own. A
  worker stuck in C code, holding the interpreter lock, could not do that;
- the *worker* runs the function on its main thread, so that `signal.alarm` works in it.

The worker keeps the two protocol pipes to itself: before any of the user's code runs, file descriptor 0 is /dev/null
and 1 is the same as 2, so that neither a `print` nor a grandchild can touch the protocol.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any, BinaryIO

from actors.reward.frames import (
    DETAIL_CHARS_MAX,
    REPLY_BYTES_MAX,
    REQUEST_BYTES_MAX,
    frame,
    pack,
    read_frame,
    unpack,
)
from actors.reward.load import load
from actors.reward.read import read_reward
from actors.reward.sources import SOURCES_BYTES_MAX, Sources
from actors.reward.steps import read_process_rewards
from actors.reward.verifiers import Setting
from schemas.errors import UserError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def answer(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Call the function; what came of it, as the reply's fields: status, reward, parts, detail, seconds."""
    begin = time.perf_counter()
    try:
        value = function(**keywords)
    except BaseException as error:  # sys.exit() in a reward function is an error of the function, too
        return {"status": "error", "detail": _last_line(error), "seconds": time.perf_counter() - begin}
    seconds = time.perf_counter() - begin
    try:
        reward, parts = read_reward(value)
        tokens, steps = read_process_rewards(value)
    except ValueError as error:
        return {"status": "invalid", "detail": str(error)[:DETAIL_CHARS_MAX], "seconds": seconds}
    except Exception as error:  # the value is an object of the user's
        return {"status": "invalid", "detail": _last_line(error), "seconds": seconds}
    detail = value.get("detail") if isinstance(value, Mapping) else None
    detail = detail[:DETAIL_CHARS_MAX] if isinstance(detail, str) else ""
    scored = {"status": "scored", "reward": reward, "parts": parts, "detail": detail, "seconds": seconds}
    return scored | ({"token_rewards": tokens} if tokens is not None else {"steps": steps} if steps else {})


def _last_line(error: BaseException) -> str:
    """`ValueError: what it says (rewards.py, line 12)`, of the innermost frame."""
    frames = extract_tb(error.__traceback__)
    at = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # its __str__ is the user's code as well
        text = f"<no text: {type(broken).__name__}>"
    return f"{type(error).__name__}: {text}"[: DETAIL_CHARS_MAX - len(at)] + at


def work(spec: str, base: Path | None, requests: BinaryIO, replies: BinaryIO) -> None:
    """Say that the function is ready, or why not; then answer every request until the parent closes the pipe."""
    body = read_frame(requests, REQUEST_BYTES_MAX)
    if body is None:
        return
    told = unpack(body)
    os.set_inheritable(told["shared"], False)  # what the function starts has no business with it
    sources = Sources(told["sources"])
    try:
        function, keywords = load(spec, told["options"], Setting(base, told["timeout_s"], told["shared"], sources))
    except UserError as error:
        _reply(replies, {"message": error.message, "remedy": error.remedy})
        return
    ran = sources.ran if sum(map(len, sources.ran.values())) <= SOURCES_BYTES_MAX else {}
    _reply(replies, {"keywords": keywords, "digest": sources.digest(spec, told["options"], base), "sources": ran})
    while (body := read_frame(requests, REQUEST_BYTES_MAX)) is not None:
        _reply(replies, answer(function, unpack(body)))


def _reply(replies: BinaryIO, fields: dict[str, Any]) -> None:
    body = pack(fields)
    assert len(body) <= REPLY_BYTES_MAX
    replies.write(frame(body))
    replies.flush()


def _take_the_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The protocol's pipes, moved to descriptors that are not inherited; 0 and 1 become harmless."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return open(requests, "rb"), open(replies, "wb")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent(parent: int, sign: signal.Signals) -> None:
    """Have the kernel send `sign` to this process when `parent` ends."""
    _prctl(_PR_SET_PDEATHSIG, sign)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), sign)


def _guard(worker: int, watched: set[signal.Signals]) -> None:
    """Wait for the worker's end, or for the word to end it; leave nothing behind; exit with the worker's status."""
    code = 0
    while signal.sigwait(watched) == signal.SIGCHLD:
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:  # each one that dies leaves us its own children: go on until none is left
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
    os._exit(code if code >= 0 else 128 - code)  # as a shell does: 128 + signal


def _children() -> list[int]:
    with contextlib.suppress(FileNotFoundError):  # a kernel built without it
        return list(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return []


def main(arguments: list[str]) -> None:
    """Become guard and worker; see the module's docstring."""
    spec, base, parent = arguments
    watched = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)  # none may be lost before the guard waits for them
    _die_with_parent(int(parent), signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    worker = os.fork()
    if worker:
        with contextlib.suppress(OSError):  # it may have done so itself, or be gone
            os.setpgid(worker, worker)
        os.close(0)  # only the worker's end of the pipes may keep them open
        os.close(1)
        _guard(worker, watched)
    os.setpgid(0, 0)
    _die_with_parent(guard, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    requests, replies = _take_the_pipes()
    work(spec, Path(base) if base else None, requests, replies)


if __name__ == "__main__":
    main(sys.argv[1:])
