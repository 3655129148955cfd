"""What one run in the sandbox may use, and what came of it. The standard library only."""

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "failed", "compile_error", "timeout", "memory", "output", "forbidden"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run. Each is positive.

    Example: `Limits(time_s=2.0, memory_bytes=256 << 20)`.
    """

    time_s: float = 10.0
    """Wall seconds, counted from the program's own start. CPU time of each process is limited to a second more."""
    memory_bytes: int = 512 << 20
    """Address space of each process, and resident memory of all of them together."""
    processes: int = 40
    """Processes and threads at one time: a pool of threads has up to 32 by itself, as many as the machine has cores."""
    file_bytes: int = 8 << 20
    """Size of a file; all files in /tmp together may have `tmp_bytes`."""
    output_bytes: int = 1 << 20
    """Of stdout, of stderr, and of a returned value: each of them."""
    tmp_bytes: int = 16 << 20
    """Size of /tmp, which is memory; fixed when a sandbox starts."""
    files: int = 1024
    """Files and folders in /tmp."""

    def __post_init__(self) -> None:
        if bad := [name for name in self.__slots__ if not getattr(self, name) > 0]:
            raise ValueError(f"{', '.join(bad)} must be positive")


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the program to call; its value comes back as JSON text.

    Example: `Call("add", "[2, 3]")`. `name` is a function of the program, or a method of its class `Solution`.
    """

    name: str
    arguments: str
    """A JSON array of positional arguments."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one run. All text is the program's and may be anything.

    `ok`: it ended with exit status 0. `failed`: it raised, exited otherwise, or died of a signal. `compile_error`: it
    is no Python. `timeout`, `memory`, `output`: it went over that limit, of which `output` is that of files, too.
    `forbidden`: it made a system call that no such program needs, see `seccomp`; to send SIGKILL is one.

    Example: `Result("ok", "5\\n", "", seconds=0.004)`.
    """

    status: Status
    stdout: str
    stderr: str
    seconds: float
    """Wall seconds from the program's start to its end."""
    value: str | None = field(default=None)
    """JSON text, claimed by the program to be what the called function returned. Not checked in any way."""


class SandboxLost(Exception):
    """The program was killed from outside, or its sandbox died or could not be started. Nothing is known about it."""
