"""One sandbox, as its parent sees it: it takes programs one after another and says what came of each."""

import contextlib
import json
import os
import secrets
import select
import struct
import subprocess
import time
from pathlib import Path

from actors.reward.sandbox.limits import Call, Limits, Result, SandboxLost, Status

START_TIMEOUT_S = 30.0
GRACE_S = 5.0  # in which the supervisor answers after a program's time; not to be counted on, but as a last bound
LOOK_S = 0.05  # between two looks at the memory of all processes
HEAD_BYTES_MAX = 4096
REPORT_KINDS: dict[bytes, Status] = {b"Kmemory": "memory", b"Kcompile_error": "compile_error", b"Kfailed": "failed"}


class Child:
    """A started sandbox. Blocking; one thread at a time, but `kill` may come from any. Raises `SandboxLost`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.clean = True
        """Whether another program may follow: nothing is left of the ones before."""
        self._process = process
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        self._ready = False
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet, as far as is known."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait until it can take a program."""
        if not self._ready and self._read(1, time.monotonic() + START_TIMEOUT_S) != b"R":
            raise SandboxLost("the sandbox broke the protocol")
        self._ready = True

    def run(self, program: str, stdin: str, call: Call | None, limits: Limits) -> Result:
        """Run `program`, or the function `call` of it. Everything that it does is a result."""
        self.wait_ready()
        begin = time.monotonic()
        request = {
            "program": program,
            "stdin": stdin,
            "call": call and [call.name, call.arguments],
            "time_s": limits.time_s,
            "memory_bytes": limits.memory_bytes,
            "processes": limits.processes,
            "file_bytes": limits.file_bytes,
            "output_bytes": limits.output_bytes,
            "files": limits.files,
        }
        body, nonce = json.dumps(request).encode(), secrets.token_bytes(16)
        deadline = begin + limits.time_s + GRACE_S
        memory = limits.memory_bytes
        self._write(struct.pack(">I", len(body)) + body + nonce, deadline)
        try:
            header = self._read(4, deadline, memory)
            (size,) = struct.unpack(">I", header)
            if size > HEAD_BYTES_MAX:
                raise SandboxLost("the sandbox broke the protocol")
            head = json.loads(self._read(size, deadline))
            if not secrets.compare_digest(str(head["nonce"]), nonce.hex()):
                raise SandboxLost("the sandbox broke the protocol")
            if any(not 0 <= size <= limits.output_bytes for size in head["sizes"]):
                raise SandboxLost("the sandbox broke the protocol")
            stdout, stderr, report = (self._read(size, deadline) for size in head["sizes"])
        except _TooMuchMemory:
            self.clean = False
            self.kill()
            return Result("memory", "", "", time.monotonic() - begin)
        except (ValueError, KeyError, TypeError) as error:
            raise SandboxLost(f"the sandbox broke the protocol: {error}") from error
        self.clean = head["clean"] is True
        value = None
        if call is not None and report.startswith(b"V"):
            value = report[1:].decode("utf-8", "replace")
        return Result(
            _status(head["limit"], head["exit"], report),
            stdout.decode("utf-8", "replace"),
            stderr.decode("utf-8", "replace"),
            float(head["seconds"]),
            value,
        )

    def kill(self) -> None:
        """End it with all that runs in it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        """End it, wait until it is gone, and close its pipes."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        poll = select.poll()
        poll.register(self._in, select.POLLOUT)
        while view:
            if not poll.poll(self._left(deadline)):
                continue
            try:
                view = view[os.write(self._in, view) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise SandboxLost(self._epitaph()) from error

    def _read(self, count: int, deadline: float, memory_bytes: int = 0) -> bytes:
        """`count` bytes; with `memory_bytes` looks now and then whether all processes together use more."""
        parts = bytearray()
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        while len(parts) < count:
            left = self._left(deadline)
            if not poll.poll(min(left, LOOK_S * 1000) if memory_bytes else left):
                if memory_bytes and _resident_bytes(self._process.pid) > memory_bytes:
                    raise _TooMuchMemory
                continue
            part = os.read(self._out, min(count - len(parts), 1 << 20))
            if not part:
                raise SandboxLost(self._epitaph())
            parts += part
        return bytes(parts)

    def _left(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise SandboxLost("the sandbox does not answer")
        return left * 1000

    def _epitaph(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        said = (self._process.stderr.read(4096) or b"").decode(errors="replace").strip().splitlines()
        how = f"the sandbox ended with status {self._process.returncode}"
        return f"{how}: {said[-1][:300]}" if said else how


class _TooMuchMemory(Exception):
    pass


def _status(limit: str, code: int, report: bytes) -> Status:
    if limit == "timeout" or code == -24:  # SIGXCPU
        return "timeout"
    if limit == "output":
        return "output"
    if code == -31:  # SIGSYS
        return "forbidden"
    if report in REPORT_KINDS:
        return REPORT_KINDS[report]
    if code == -9:  # SIGKILL
        return "killed"
    return "ok" if code == 0 else "failed"


def _resident_bytes(root: int) -> int:
    """Of the process and all that descend from it; what is shared with others is left out."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
            total += (int(resident) - int(shared)) * _PAGE
            for task in os.listdir(f"/proc/{pid}/task"):
                waiting += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return total


_PAGE = os.sysconf("SC_PAGE_SIZE")
