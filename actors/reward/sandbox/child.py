"""One sandbox, as its parent sees it: it takes programs one after another and says what came of each."""

import contextlib
import os
import secrets
import select
import subprocess
import time
from signal import SIGKILL, SIGSYS, SIGXCPU

from actors.reward.sandbox.inside import ENDS, HEAD, NONCE_BYTES, REQUEST
from actors.reward.sandbox.limits import Call, Limits, Result, SandboxLost, Status
from actors.reward.sandbox.memory import used_bytes

START_TIMEOUT_S = 30.0
GRACE_S = 5.0  # in which the supervisor answers after a program's time; not to be counted on, but as a last bound
CLOSE_S = 0.5
LOOK_S = 0.05  # between two looks at the memory of all processes
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
        texts = [program.encode("utf-8", "surrogatepass"), stdin.encode("utf-8", "surrogatepass"), b"", b""]
        if call is not None:
            texts[2:] = call.name.encode(), call.arguments.encode()
        numbers = (limits.memory_bytes, limits.processes, limits.file_bytes, limits.output_bytes, limits.files)
        head = REQUEST.pack(limits.time_s, *numbers, *map(len, texts))
        nonce = secrets.token_bytes(NONCE_BYTES)
        deadline = begin + limits.time_s + GRACE_S
        memory = limits.memory_bytes
        self._write(b"".join((head, *texts, nonce)), deadline)
        try:
            head = self._read(HEAD.size, deadline, memory)
            replied, end, code, seconds, clean, *sizes = HEAD.unpack(head)
            if not secrets.compare_digest(replied, nonce) or end >= len(ENDS) or max(sizes) > limits.output_bytes:
                raise SandboxLost("the sandbox broke the protocol")
            stdout, stderr, report = (self._read(size, deadline) for size in sizes)
        except _TooMuchMemory:
            self.clean = False
            self.kill()
            return Result("memory", "", "", time.monotonic() - begin)
        self.clean = clean
        if not ENDS[end] and code == -SIGKILL and report not in REPORT_KINDS:  # it cannot have sent that itself
            raise SandboxLost(f"the program was killed from outside after {seconds:.1f} s")
        value = None
        if call is not None and report.startswith(b"V"):
            value = report[1:].decode("utf-8", "replace")
        return Result(
            _status(ENDS[end], code, report),
            stdout.decode("utf-8", "replace"),
            stderr.decode("utf-8", "replace"),
            seconds,
            value,
        )

    def kill(self) -> None:
        """End it with all that runs in it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        """End it, wait until it is gone, and close its pipes. One that waits for a program ends by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        for timeout_s in (CLOSE_S, 10.0):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
                break
            self.kill()
        for pipe in (self._process.stdout, self._process.stderr):
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
                if memory_bytes and used_bytes(self._process.pid) > memory_bytes:
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
    if limit == "timeout" or code == -SIGXCPU:
        return "timeout"
    if limit == "output":
        return "output"
    if code == -SIGSYS:
        return "forbidden"
    if report in REPORT_KINDS:
        return REPORT_KINDS[report]
    return "ok" if code == 0 else "failed"
