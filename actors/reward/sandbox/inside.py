"""What runs in the sandbox: a supervisor, process 1 of its own process namespace, and the program in a fork of it.

Started by `launch` as a compiled file of its own, so nothing but the standard library can be imported. The kernel does
not deliver to process 1 any signal from inside its namespace, so the program cannot end or stop it; it holds no answer,
and the word that makes a reply count (`nonce`) is read only after the program has ended. When a program ends, all that
it has started is killed.

Requests, on descriptor 0: `REQUEST`, its texts, then 16 bytes of nonce. Replies, on descriptor 1: `HEAD`, its texts.

It is started for every program, so it imports next to nothing: `json` and `typing` would double the time of a start.

Its one argument, in hex, is the filter of system calls that takes SIGKILL away from the program, see `seccomp`.
"""

from __future__ import annotations

import _ctypes  # `ctypes` takes 3 ms
import _signal  # type: ignore[import-not-found]  # `signal` takes 7 ms: it makes enumerations
import atexit
import builtins
import errno
import gc
import io
import os
import resource
import select
import struct
import sys
import time

TYPE_CHECKING = False  # `typing` takes 6 ms
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any, NoReturn

REQUESTS, REPLIES = 50, 51
REPORT = 3  # where the harness in the program's process tells what came of it
NONCE_BYTES = 16
REQUEST = struct.Struct(">d9Q")
"""Seconds; bytes of memory, processes, bytes of a file, bytes of output, files; lengths of program, stdin, name of the
function to call (0: none), its arguments."""
HEAD = struct.Struct(">16sBid?3Q")
"""Nonce; which limit ended it (an index of `ENDS`); exit status; seconds; whether another program may follow; lengths
of stdout, stderr, report."""
ENDS = ("", "timeout", "output")
STACK_BYTES = 32 << 20  # the usual 8 MB end a recursion through lru_cache or sorted(key=...) below 20,000 levels
RECURSION_MAX = 50_000  # as the public graders of such programs allow; 1,000 is too few for a search of a grid
OFFERED = {
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "datetime": "timedelta",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce wraps",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile groupby"
    " islice pairwise permutations product repeat starmap takewhile zip_longest",
    "json": "",
    "math": "ceil comb cos exp factorial floor gcd hypot inf isqrt lcm log log10 log2 perm pi prod sin sqrt",
    "operator": "and_ attrgetter itemgetter or_ xor",
    "random": "choice randint shuffle",
    "re": "",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "sys": "",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generic Iterable Iterator List Literal Mapping NamedTuple"
    " Optional Sequence Set Tuple Type TypeVar Union",
}
"""Modules, and names in them, that a program with a function to call may use without importing them, as at LeetCode:
the code that such problems begin with says `List[int]` and imports nothing. Names of common methods, such as `add`,
are not among them: what is imported costs each test milliseconds."""
CHUNK = 1 << 16
STREAMS = {
    name: fd
    for fd, stream in enumerate(("stdin", "stdout", "stderr"))
    for name in (f"/dev/{stream}", f"/dev/fd/{fd}", f"/proc/self/fd/{fd}")
}
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOOK_S = 0.05  # between two looks at what no kernel limit covers


def main() -> dict[str, Any]:
    """Serve requests until the parent closes the pipe. Returns, in the fork, the request whose program is to be run."""
    os.dup2(0, REQUESTS, inheritable=False)
    os.dup2(1, REPLIES, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # with a handler it would be delivered
    gc.freeze()  # a collection in a fork would touch, and so copy, all memory
    os.write(REPLIES, b"R")  # ready
    while True:
        header = _read(REQUEST.size)
        if not header:
            os._exit(0)
        time_s, memory, processes, file_bytes, output_bytes, files, *lengths = REQUEST.unpack(header)
        program, stdin, name, arguments = map(_read, lengths)
        request = {
            "time_s": time_s,
            "memory_bytes": memory,
            "processes": processes,
            "file_bytes": file_bytes,
            "output_bytes": output_bytes,
            "files": files,
            "program": program.decode("utf-8", "surrogatepass"),
            "call": (name.decode(), arguments.decode()) if name else None,
        }
        if name:
            import json  # noqa: F401  # here, so that the forks have it
        pipes = [os.pipe() for _ in range(4)]  # stdin, stdout, stderr, report
        child = os.fork()
        if not child:
            _become(request, pipes)
            return request
        for pipe, side in zip(pipes, (0, 1, 1, 1), strict=True):
            os.close(pipe[side])
        _watch(child, request, stdin, [pipes[0][1], pipes[1][0], pipes[2][0], pipes[3][0]])


def _read(count: int) -> bytes:
    parts = []
    while count:
        part = os.read(REQUESTS, min(count, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _become(request: dict[str, Any], pipes: list[tuple[int, int]]) -> None:
    """In the fork: take the program's descriptors, let go of all others, and accept the limits."""
    os.setsid()
    for fd, (pipe, side) in enumerate(zip(pipes, (0, 1, 1, 1), strict=True)):
        os.dup2(pipe[side], 60 + fd)
    for fd in range(4):
        os.dup2(60 + fd, fd, inheritable=fd < 3)
    os.closerange(4, 1 << 16)
    limits = {
        resource.RLIMIT_CPU: _cpu_seconds(request),
        resource.RLIMIT_AS: request["memory_bytes"],
        resource.RLIMIT_NPROC: request["processes"] + 1,
        resource.RLIMIT_FSIZE: request["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 1,  # 0 would still start the host's handler of crashes
        resource.RLIMIT_STACK: STACK_BYTES,
    }
    for name, limit in limits.items():
        _, most = resource.getrlimit(name)  # this machine may allow less
        hard = limit + (name == resource.RLIMIT_CPU)  # at the lower limit of CPU time comes SIGXCPU, which tells why
        hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(name, (min(limit, hard), hard))
    _filter(bytes.fromhex(sys.argv[1]))


def _filter(rules: bytes) -> None:
    """Accept a filter of system calls."""
    place = id(rules) + bytes.__basicsize__ - 1  # of what it holds
    loaded = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None: all that is in this process
    prctl = _ctypes.dlsym(loaded, "prctl")
    if _ctypes.call_function(prctl, (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct.pack("H6xP", len(rules) // 8, place))):
        os._exit(1)


def _send(pid: int, number: int) -> None:
    """`os.kill` for the program, which has no SIGKILL: no child of its handles that other one either."""
    _kill(pid, _signal.SIGRTMAX if number == _signal.SIGKILL else number)


def _send_to_group(group: int, number: int) -> None:
    """`os.killpg`."""
    _killpg(group, _signal.SIGRTMAX if number == _signal.SIGKILL else number)


_kill, _killpg = os.kill, os.killpg


class _Open:
    """`open`, which knows the standard streams by their names: those lie in /proc, which is not there."""

    def __call__(self, file: Any, *how: Any, **named: Any) -> Any:
        if (name := str(file)) in STREAMS and not isinstance(file, int):
            file = os.dup(STREAMS[name])
        return _builtin_open(file, *how, **named)


_builtin_open = open


def _cpu_seconds(request: dict[str, Any]) -> int:
    return int(request["time_s"]) + 2


def _watch(child: int, request: dict[str, Any], given: bytes, pipes: list[int]) -> None:
    """Feed and read the program until it ends or must be ended; kill what is left of it; reply."""
    begin = time.monotonic()
    deadline = begin + request["time_s"]
    feed: int | None = pipes[0]
    sources = pipes[1:]
    stdin = memoryview(given)
    ended = os.pidfd_open(child)
    poll = select.poll()
    for fd in (ended, *sources):
        poll.register(fd, select.POLLIN)
    os.set_blocking(pipes[0], False)
    poll.register(pipes[0], select.POLLOUT)
    read = {fd: bytearray() for fd in sources}
    status = ""
    running = True
    while running and not status:
        left = deadline - time.monotonic()
        if left <= 0:
            status = "timeout"
        elif _files() > request["files"]:
            status = "output"
        for fd, _ in poll.poll(1000 * min(LOOK_S, max(0.0, left)) + 1):
            if fd == ended:
                running = False
            elif fd == feed:
                try:
                    stdin = stdin[os.write(feed, stdin[:CHUNK]) :] if stdin else stdin
                except OSError as error:
                    stdin = stdin if error.errno == errno.EAGAIN else stdin[:0]
                if not stdin:
                    poll.unregister(fd)
                    os.close(fd)
                    feed = None
            elif not _take(fd, read[fd], request["output_bytes"]):
                poll.unregister(fd)
            elif len(read[fd]) > request["output_bytes"]:
                status = "output"
    seconds = time.monotonic() - begin
    code, cpu_s = _end(child)
    if os.WIFSIGNALED(code) and os.WTERMSIG(code) == _signal.SIGKILL and cpu_s >= _cpu_seconds(request):
        status = status or "timeout"
    for fd, taken in read.items():
        while len(taken) <= request["output_bytes"] and _take(fd, taken, request["output_bytes"]):
            pass
        if len(taken) > request["output_bytes"]:
            status = status or "output"
        os.close(fd)
    os.close(ended)
    if feed is not None:
        os.close(feed)
    _reply(status, code, seconds, [bytes(read[fd][: request["output_bytes"]]) for fd in sources])


def _clean() -> bool:
    """Whether nothing is left in /tmp, nor on it: the next run sees no name, mode, time or attribute of this one."""
    try:
        left = os.listdir("/tmp")  # fails if the program has closed it to us
        os.chmod("/tmp", 0o1777)
        os.utime("/tmp", (0, 0))
    except OSError:
        return False
    try:
        return not left and not os.listxattr("/tmp")
    except OSError as error:
        return error.errno == errno.ENOTSUP


def _files() -> int:
    """In /tmp. The kernel counts them against no other limit, and each takes a kilobyte of its memory."""
    found = os.statvfs("/tmp")
    return found.f_files - found.f_ffree


def _take(fd: int, into: bytearray, most: int) -> bool:
    """Read once; a byte more than allowed at most. False at the end."""
    part = os.read(fd, min(CHUNK, most + 1 - len(into)) or 1)
    into += part
    return bool(part)


def _end(child: int) -> tuple[int, float]:
    """Kill and reap all processes but this one; the wait status of the child, and the CPU seconds that it took."""
    try:  # noqa: SIM105  # contextlib takes long to import
        os.kill(-1, _signal.SIGKILL)
    except ProcessLookupError:
        pass
    code, cpu_s = 0, 0.0
    while True:
        try:
            ended, status, used = os.wait3(0)
        except ChildProcessError:
            return code, cpu_s
        if ended == child:
            code, cpu_s = status, used.ru_utime + used.ru_stime


def _reply(status: str, code: int, seconds: float, parts: list[bytes]) -> None:
    clean = _clean()
    nonce = _read(NONCE_BYTES)
    exit_status = os.waitstatus_to_exitcode(code)
    head = HEAD.pack(nonce, ENDS.index(status), exit_status, seconds, clean, *map(len, parts))
    out = memoryview(head + b"".join(parts))
    while out:
        out = out[os.write(REPLIES, out) :]


def run(request: dict[str, Any]) -> None:
    """In the fork: the program as it would run by itself, or the call of its function. Reports what came of it."""
    call = request.get("call")
    module = type(sys)("program" if call else "__main__")
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # `site`, left out, brings them
    os.kill, os.killpg = _send, _send_to_group
    builtins.open = io.open = _Open()
    try:
        code = compile(request["program"].removeprefix("\ufeff"), "program.py", "exec", dont_inherit=True)
    except MemoryError:
        _report("memory")
    except (SyntaxError, ValueError, RecursionError, OverflowError, UnicodeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        _report("compile_error")
    request.clear()
    sys.setrecursionlimit(RECURSION_MAX)
    try:
        try:
            if call:
                _offer(code, module)
            exec(code, module.__dict__)
            if call:
                import json

                name, arguments = call
                value = _function(module, name)(*json.loads(arguments))
                text = json.dumps(value, allow_nan=False)
                sys.stdout.flush()
                _say(b"V" + text.encode("ascii"))
        except SystemExit as error:
            _finish(module, error.code)
        _finish(module, 0)
    except MemoryError:
        _report("memory")
    except BaseException as error:
        import traceback

        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        _report("failed")


def _offer(code: CodeType, module: ModuleType) -> None:
    """Put what of `OFFERED` the program names into its module, before it puts there what it imports or defines."""
    names: set[str] = set()
    codes = [code]
    while codes:
        one = codes.pop()
        names.update(one.co_names)
        codes += [constant for constant in one.co_consts if isinstance(constant, type(code))]
    for source, offered in OFFERED.items():
        if source in names and (source != "copy" or "deepcopy" in names):  # lists have a copy, too
            module.__dict__[source] = __import__(source)
        for name in names.intersection(offered.split()):
            module.__dict__[name] = getattr(__import__(source), name)


def _finish(module: ModuleType, code: Any) -> NoReturn:
    """End as the interpreter does, but for taking everything apart, which would take longer than most programs.

    Whatever it raises is reported as the program's.
    """
    if threading := sys.modules.get("threading"):
        threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.settrace(None)
    sys.setprofile(None)
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    _flush()  # a stream of the program's own needs its globals for that
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    module.__dict__.clear()  # files that it left open write what they hold
    _flush()
    os._exit((code or 0) & 0xFF)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def _function(module: ModuleType, name: str) -> Any:
    function = getattr(module, name, None)
    if function is None and hasattr(module, "Solution"):
        function = getattr(module.Solution(), name, None)
    if function is None:
        raise NameError(f"the program defines no {name!r}")
    return function


def _report(kind: str) -> NoReturn:
    """Tell how it ended and end at once."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        _say(b"K" + kind.encode())
        os._exit(1)


def _say(text: bytes) -> None:
    view = memoryview(text)
    while view:
        view = view[os.write(REPORT, view) :]


if __name__ == "__main__":
    run(main())
