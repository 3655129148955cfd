"""Starts sandboxes: the command line of bubblewrap, and the thread from which they are started.

One thread starts all sandboxes of a pool and lives as long as it: the kernel ends a process "with its parent" when the
*thread* that started it ends. If we are root, the thread has a mount namespace of its own, in which the Python runtime
lies where an unprivileged user can read it, and the sandboxes are started as such a user: limits on the number of
processes do not hold for root, and a way out of the sandbox would otherwise lead to root's files.
"""

import contextlib
import ctypes
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from actors.reward.sandbox.runtime import Runtime, compiled_supervisor, find_runtime, seen_by_others
from actors.reward.sandbox.seccomp import bpf, bpf_without_sigkill
from schemas.errors import UserError

INSTALL = "Install bubblewrap 0.8 or newer: apt-get install bubblewrap (or: dnf, pacman, apk)."
ALLOW = (
    "Allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker run with --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined, or in a virtual machine."
)
NOBODY = 65534
_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_TMPFS_BYTES_SMALL = 65536
_STAGES = (Path("/mnt"), Path("/media"), Path("/srv"))


def find_bwrap() -> str:
    """Raises `UserError` if bubblewrap is not installed."""
    if found := shutil.which("bwrap"):
        return found
    raise UserError("Code is run in bubblewrap, and there is no `bwrap` on this machine.", INSTALL)


class Launcher:
    """Starts sandboxes, one after another, from a thread of its own. `close` it at the end."""

    def __init__(self, tmp_bytes: int) -> None:
        self._tmp_bytes = tmp_bytes
        self._orders: queue.SimpleQueue[Future[subprocess.Popen[bytes]] | Callable[[], None] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name="sandbox launcher", daemon=True)
        self._bwrap = find_bwrap()
        self._filter = bpf()
        self._runtime = find_runtime()
        self._user: dict[str, object] = {}
        self._command: list[str] = []
        self._thread.start()

    def order(self) -> "Future[subprocess.Popen[bytes]]":
        """Have a sandbox started. The future raises `UserError` if we cannot isolate, `OSError` if nothing starts."""
        future: Future[subprocess.Popen[bytes]] = Future()
        self._orders.put(future)
        return future

    def later(self, work: Callable[[], None]) -> None:
        """Have something done by the thread, so that nobody waits for it."""
        self._orders.put(work)

    def close(self) -> None:
        """End the thread, and with it all that it has started. The orders before are carried out."""
        self._orders.put(None)
        self._thread.join(30)

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            sources = self._unprivileged()
            self._command = _command(self._bwrap, self._runtime, sources, self._tmp_bytes)
        except BaseException as raised:
            error = raised
        while (future := self._orders.get()) is not None:
            if not isinstance(future, Future):
                with contextlib.suppress(OSError):
                    future()
                continue
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                try:
                    future.set_result(self._start())
                except BaseException as raised:
                    future.set_exception(raised)
            else:
                future.set_exception(error)

    def _start(self) -> "subprocess.Popen[bytes]":
        with _file_with(self._filter) as rules, _file_with(compiled_supervisor()) as program:
            numbers = {"SECCOMP": str(rules), "PROGRAM": str(program)}
            process: subprocess.Popen[bytes] = subprocess.Popen(
                [numbers.get(word, word) for word in self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={},
                cwd="/",
                pass_fds=(rules, program),
                start_new_session=True,
                **self._user,  # type: ignore[call-overload]
            )
            return process

    def _unprivileged(self) -> dict[Path, Path]:
        """Arrange that sandboxes start as an unprivileged user; where the runtime's trees are for that user."""
        trees = {tree: tree for tree in self._runtime.trees}
        if os.geteuid() != 0 or not _maps(NOBODY):
            return trees
        self._user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        if all(map(seen_by_others, trees)):
            return trees
        try:
            _call("unshare", _CLONE_NEWNS)  # of this thread alone: what is mounted below, nobody else sees
            _mount("none", Path("/"), _MS_REC | _MS_PRIVATE)
            opened = {tree: os.open(tree, os.O_PATH) for tree in trees}
            stage = next(path for path in _STAGES if path.is_dir())
            _mount("tmpfs", stage, 0, "tmpfs")
            for number, (tree, fd) in enumerate(opened.items()):
                place = stage / str(number)
                place.mkdir() if tree.is_dir() else place.touch()
                _mount(f"/proc/self/fd/{fd}", place, _MS_BIND | _MS_REC)
                os.close(fd)
                trees[tree] = place
            if not all(map(seen_by_others, trees.values())):
                raise PermissionError("root alone may read it")
        except (OSError, StopIteration) as error:
            raise UserError(
                f"The sandbox runs code as an unprivileged user, who cannot read {self._runtime.interpreter}: {error}.",
                "Use a Python that is installed for all users, or do not run as root.",
            ) from error
        return trees


def _command(bwrap: str, runtime: Runtime, sources: dict[Path, Path], tmp_bytes: int) -> list[str]:
    small = ["--size", str(_TMPFS_BYTES_SMALL), "--tmpfs"]
    words = [
        *(bwrap, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
        *("--unshare-cgroup-try", "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox"),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"),
        *("--setenv", "LANG", "C", "--setenv", "HOME", "/tmp", "--setenv", "USER", "nobody"),  # no other locale is seen
        *("--setenv", "MALLOC_ARENA_MAX", "2", "--setenv", "OMP_NUM_THREADS", "1"),
    ]
    for inside, source in sources.items():
        words += ["--ro-bind", str(source), str(inside)]
    for path in runtime.hidden:
        words += [*small, str(path), "--remount-ro", str(path)]
    for target, link in runtime.links:
        words += ["--symlink", target, link]
    words += [*small, "/dev", "--size", str(tmp_bytes), "--perms", "1777", "--tmpfs", "/tmp"]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        words += ["--dev-bind", device, device]
    words += ["--remount-ro", "/dev", "--perms", "0444", "--ro-bind-data", "PROGRAM", "/supervisor.pyc"]
    words += ["--remount-ro", "/", "--chdir", "/tmp", "--seccomp", "SECCOMP", "--"]
    words += [str(runtime.interpreter), "-I", "-S", "-X", "utf8", "/supervisor.pyc"]
    return [*words, bpf_without_sigkill().hex()]


@contextlib.contextmanager
def _file_with(content: bytes) -> Iterator[int]:
    """A file in memory that holds `content`, to be read from its begin.

    No pipe: a program whose user is ours may have used up what its user may have of them; then they hold next to
    nothing, and we would wait for a reader that is not started yet.
    """
    with open(os.memfd_create("sandbox"), "r+b", buffering=0) as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


def _maps(uid: int) -> bool:
    """Whether `uid` is a user here: a container's root may be the only one."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= uid < first + count:
            return True
    return False


def _mount(source: str, target: Path, flags: int, kind: str | None = None) -> None:
    _call("mount", source.encode(), str(target).encode(), kind and kind.encode(), flags, None)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
