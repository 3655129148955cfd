"""One reward process, as its parent sees it: started, asked one thing at a time, killed with all that it started."""

import asyncio
import contextlib
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from actors.reward.config import RewardConfig
from actors.reward.frames import DETAIL_CHARS_MAX, HEADER, REPLY_BYTES_MAX, frame, pack, unpack
from actors.reward.steps import check_steps, read_float32
from actors.reward.verdict import Verdict
from schemas.errors import UserError

OUTPUT_BYTES_KEPT = 2048
_KILL_TIMEOUT_S = 2.0
_ROOT = Path(__file__).resolve().parents[2]


class ChildLost(Exception):
    """The process died, or broke the protocol, before it answered. The text says how, with the last line it wrote."""


class ChildSilent(Exception):
    """The process did not answer in time. The text is the last line that it wrote."""


class RewardProcess:
    """A child. `spawn` it, `load` it, then `ask` it; after `ChildLost` or `ChildSilent` only `kill` is left to do."""

    def __init__(self, process: asyncio.subprocess.Process, shared: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.keywords: frozenset[str] = frozenset()
        """What the function takes, of a request's fields."""
        self.digest = ""
        """Of the function's source files and options."""
        self.generation = 0
        """Of the function, counted by the pool from load to load."""
        self.sources: dict[str, bytes] = {}
        """The user's files that it ran, by path."""
        self._shared = shared
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._output = b""
        self._reader = asyncio.create_task(self._keep_output())

    @classmethod
    async def spawn(cls, spec: str, base: Path | None, shared: int) -> "RewardProcess":
        """Start a child for the function `spec`; it is not ready before `load`. It inherits the descriptor `shared`."""
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = await asyncio.create_subprocess_exec(
            # -P: the current folder must not shadow our packages; -u: what it prints is seen even if it is killed
            *(sys.executable, "-P", "-u", "-m", "actors.reward.child"),
            *(spec, str(base or ""), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},  # several children share the cores
            start_new_session=True,
            pass_fds=(shared,),
        )
        return cls(process, shared)

    async def load(self, config: RewardConfig, sources: Mapping[str, bytes]) -> None:
        """Have the child load the function, and wait until it has. `sources` are run instead of these files.

        Raises `UserError` if it cannot, `ChildLost` if the child dies over it, `ChildSilent` if it takes too long.
        """
        async with self._deadline(config.start_timeout_s):
            told = {
                "options": config.options,
                "timeout_s": config.timeout_s,
                "sources": sources,
                "shared": self._shared,
            }
            self._stdin.write(frame(pack(told)))
            await self._stdin.drain()
            loaded = await self._reply()
        if "message" in loaded:
            raise UserError(str(loaded["message"]), str(loaded.get("remedy", "")))
        self.keywords = frozenset(map(str, loaded.get("keywords", ())))
        self.digest = str(loaded.get("digest", ""))[:100]
        self.sources = {str(path): bytes(body) for path, body in loaded.get("sources", {}).items()}

    async def ask(self, body: bytes, timeout_s: float) -> Verdict:
        """The child's verdict on one request. `timeout_s` counts from the start of the function's call.

        The child has loaded the function and waits in a read, so the call starts when it is asked. Having it say so
        took a system call, a wake-up and a task switch more than the answer itself.

        Raises `ChildSilent` and `ChildLost`.
        """
        async with self._deadline(timeout_s):
            if not self.alive:  # uvloop answers a write to a closed pipe with a RuntimeError
                raise ConnectionResetError
            self._stdin.write(frame(body))
            await self._stdin.drain()
            return _verdict(await self._reply())

    @property
    def alive(self) -> bool:
        """Whether it can be asked: somebody may kill a child that waits for its next request."""
        return self._process.returncode is None and not self._stdin.is_closing() and not self._stdout.at_eof()

    async def kill(self) -> None:
        """Kill the child with all that it started, at once, and wait until they are gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()  # the guard does the rest
        try:
            await asyncio.wait_for(self._process.wait(), _KILL_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        # There is no public way to close the pipes, and one with unread bytes in it would stay open.
        self._process._transport.close()  # type: ignore[attr-defined]
        await self._reader

    @contextlib.asynccontextmanager
    async def _deadline(self, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise ChildSilent(self.last_line()) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ChildLost(await self._epitaph()) from None
        except ValueError as error:
            raise ChildLost(f"it broke the protocol: {error}") from error

    async def _reply(self) -> dict[str, Any]:
        reply = await self._frame()
        if not isinstance(reply, dict):
            raise ValueError(f"a reply of type {type(reply).__name__}")
        return reply

    async def _frame(self) -> Any:
        (length,) = HEADER.unpack(await self._stdout.readexactly(HEADER.size))
        if length > REPLY_BYTES_MAX:
            raise ValueError(f"a reply of {length} bytes")
        return unpack(await self._stdout.readexactly(length))

    async def _epitaph(self) -> str:
        """How the child ended. Called when its pipe has closed, so that its end is near."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _KILL_TIMEOUT_S)
        code = self._process.returncode
        if code is None:
            how = "it closed its pipe"
        else:
            sign = -code if code < 0 else code - 128  # the guard's own end, or the worker's as the guard reports it
            known = sign in {int(s) for s in signal.Signals}
            how = f"it was killed by {signal.Signals(sign).name}" if known else f"it exited with status {code}"
        return f"{how}; last output: {line}" if (line := self.last_line()) else how

    def last_line(self) -> str:
        """The last line that the child printed, of the 2 kB that are kept; empty if there is none."""
        lines = self._output.decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")

    async def _keep_output(self) -> None:
        """Read all that the child prints, so that it never blocks on a full pipe, and keep the end of it."""
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(1 << 16):
            self._output = (self._output + chunk)[-OUTPUT_BYTES_KEPT:]


def _verdict(reply: dict[str, Any]) -> Verdict:
    """Raises `ValueError` unless the reply is a verdict: the user's code shares the child and could have written it."""
    status, reward, parts = reply.get("status"), reply.get("reward"), reply.get("parts", {})
    detail, seconds = reply.get("detail"), reply.get("seconds")

    def finite(number: object) -> TypeGuard[float]:
        return isinstance(number, float) and math.isfinite(number)

    if (
        status not in ("scored", "error", "invalid")
        or (status == "scored") != finite(reward)
        or not (isinstance(parts, dict) and all(isinstance(k, str) and finite(v) for k, v in parts.items()))
        or not isinstance(detail, str)
        or not finite(seconds)
    ):
        raise ValueError("a reply that is no verdict")
    tokens, steps = reply.get("token_rewards", b""), reply.get("steps", [])
    if not isinstance(tokens, bytes) or not isinstance(steps, list):
        raise ValueError("process rewards that are none")
    return Verdict(
        status,
        reward,
        parts,
        detail[:DETAIL_CHARS_MAX],
        seconds,
        token_rewards=read_float32(tokens),
        steps=tuple(check_steps(steps)),
    )
