"""Full files on this machine's own disk, made of deltas or fetched over the bus once for all workers of a host."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bus.weights.files import Buffer, version_and_base, write_whole
from schemas import UserError

KEPT = 2  # versions: the newest, and the one that a slower worker may be about to open
BUILD_WAIT_S = 60.0  # for another worker that makes the same file; it may be stopped, so then we make it too
LOOK_S = 0.02


class HostCache:
    """The folder of one run in this machine's folder for temporary files (`TMPDIR`), shared by a user's processes.

    No other run may have the same `name`: it would remove what is old by its own versions. The folder goes away
    with the last of the processes; what killed ones left is removed by the next one, of any run.
    """

    def __init__(self, name: str, root: Path | None = None) -> None:
        self._root = root or Path(tempfile.gettempdir()) / f"rollstream-{os.getuid()}"
        self.folder = self._root / name
        self._used: int | None = None

    def path(self, name: str) -> Path:
        """Where a file is, if it is here."""
        return self.folder / name

    def put(self, name: str, content: Buffer, keep: int = -1) -> Path:
        """Put a file here, whole, and remove those of all but the newest versions and of version `keep`.

        Raises `UserError` if the disk is full: it may be another one than that of the run.
        """
        self.open()
        try:
            write_whole(self.path(name), content, durable=False)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"The disk of {self.folder} is full: {len(content) / 1e6:.0f} MB of weights do not fit.",
                f"Free some space there, or set TMPDIR to a folder with room for {KEPT + 1} versions.",
            ) from None
        files = {path: place[0] for path in self.folder.glob("v*") if (place := version_and_base(path.name))}
        newest = sorted(set(files.values()))[-KEPT:]
        for path, version in files.items():
            if version not in newest and version != keep and path.name != name:
                path.unlink(missing_ok=True)
        return self.path(name)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """One worker at a time makes a file; who comes later finds it. Blocks up to `BUILD_WAIT_S`."""
        self.open()
        descriptor = os.open(self.folder / ".building", os.O_RDWR | os.O_CREAT, 0o600)
        until_s = time.monotonic() + BUILD_WAIT_S
        try:
            while not _locked(descriptor, fcntl.LOCK_EX) and time.monotonic() < until_s:
                time.sleep(LOOK_S)
            yield
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Leave; the last one removes the folder. What is memory-mapped stays readable."""
        if self._used is None:
            return
        alone = _locked(self._used, fcntl.LOCK_EX)
        if alone:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._used)
        self._used = None

    def open(self) -> None:
        """Begin to use the folder, so that others leave it there. May be repeated."""
        if self._used is not None:
            return
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._root.stat().st_uid != os.getuid():
            raise UserError(f"{self._root} belongs to another user.", "Remove it, or set TMPDIR to a folder of yours.")
        self._sweep()
        while self._used is None:
            self.folder.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the last of the others has just removed it
                used = _joined(self.folder)
                if used is not None:
                    self._used = used

    def _sweep(self) -> None:
        """Remove the folders that nobody uses: their processes were killed."""
        for folder in self._root.iterdir():
            with contextlib.suppress(OSError):
                descriptor = os.open(folder / ".used", os.O_RDWR)
                if folder != self.folder and _locked(descriptor, fcntl.LOCK_EX):
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


def _joined(folder: Path) -> int | None:
    """A lock that says that we use the folder; None if it was removed meanwhile."""
    used = os.open(folder / ".used", os.O_RDWR | os.O_CREAT, 0o600)
    if _locked(used, fcntl.LOCK_SH) and (folder / ".used").exists():
        return used
    os.close(used)
    time.sleep(LOOK_S)
    return None


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
