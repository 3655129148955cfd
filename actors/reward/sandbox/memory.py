"""How much memory all processes of a sandbox use together, as seen from outside, with what they try to hide."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from actors.reward.sandbox.seccomp import SHARED_BYTES_MAX

_COUNTED = ("RssAnon:", "VmSwap:", "HugetlbPages:")
_MAPS_BYTES_MAX = 2 << 20  # of all lists of mappings; that of an honest process has some hundred of 100 bytes each
_SEND_BUFFER = Path("/proc/sys/net/core/wmem_default")
_BEYOND_ALL = 1 << 62


def used_bytes(root: int) -> int:
    """Of the process and all that descend from it; without files, for which there are other limits.

    Memory that is shared, and in no file, counts by what it may have: its pages stay when those who touched them have
    let go of them. Whoever has more mappings than can be looked through is beyond all limits: each costs the kernel
    memory that counts nowhere.
    """
    private, shared, sockets, left = 0, set[bytes](), 0, _MAPS_BYTES_MAX
    for process, tasks in _family(root):
        private += max(map(_private_bytes, tasks), default=0)  # the first may have ended, and then it tells nothing
        maps = b"".join(_mappings(tasks, left))
        left -= len(maps)
        if left <= 0:
            return _BEYOND_ALL
        shared |= set(_shared(maps))
        if process.name != str(root):  # which is in the host's network
            sockets = max(sockets, _sockets(process))
    return private + len(shared) * SHARED_BYTES_MAX + sockets * _socket_bytes()


@functools.cache
def _socket_bytes() -> int:
    """What the kernel keeps at most of what was sent by one and not received: its buffer, and the last message."""
    try:
        return 2 * int(_SEND_BUFFER.read_text())
    except (OSError, ValueError):
        return 2 * 212_992  # as Linux has it where nobody has set another


def _family(root: int) -> Iterator[tuple[Path, list[Path]]]:
    """Each process with its threads, as folders of /proc."""
    waiting = [str(root)]
    while waiting:
        process = Path("/proc") / waiting.pop()
        with contextlib.suppress(OSError):
            tasks = [process / "task" / task for task in os.listdir(process / "task")]
            for task in tasks:
                with contextlib.suppress(OSError):
                    waiting += (task / "children").read_text().split()
            yield process, tasks


def _private_bytes(task: Path) -> int:
    total = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (task / "status").read_text().splitlines():
            if line.startswith(_COUNTED):
                total += int(line.split()[1]) << 10
    return total


def _mappings(tasks: list[Path], most: int) -> Iterator[bytes]:
    """The list of mappings of a process, not much more of it than `most` bytes."""
    for task in tasks:
        with contextlib.suppress(OSError), open(task / "maps", "rb", buffering=0) as file:
            read = 0
            while read < most and (part := file.read(1 << 16)):
                read += len(part)
                yield part
            if read:
                return


def _shared(maps: bytes) -> Iterator[bytes]:
    """What tells mappings of shared memory apart: their device and inode."""
    for line in maps.splitlines():
        if b"/dev/zero" in line and (fields := line.split(maxsplit=5))[1][3:4] == b"s":
            yield b" ".join(fields[3:5])


def _sockets(process: Path) -> int:
    """That there are in its network: the only ones that it can have are pairs."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (process / "net" / "protocols").read_text().splitlines()
        return sum(int(line.split()[2]) for line in lines if line.startswith("UNIX"))
    return 0
