"""What of this machine a sandboxed Python needs to see: its interpreter, its standard library, its shared libraries."""

import functools
import importlib.util
import marshal
import os
import stat
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import UserError

_MAPPED = """
import glob, importlib, os, sys
for path in glob.glob(os.path.join(sys.argv[1], "*.so")):
    try: importlib.import_module(os.path.basename(path).partition(".")[0])
    except ImportError: pass
for line in open("/proc/self/maps"):
    if (path := line.split(maxsplit=5)[5:]) and ".so" in path[0]: print(path[0].strip())
"""  # all extension modules of the standard library, so that what they link to is known


@dataclass(frozen=True, slots=True)
class Runtime:
    """Absolute paths, each at the same place inside."""

    interpreter: Path
    trees: tuple[Path, ...]
    """Folders and files to be seen read-only; none lies in another."""
    hidden: tuple[Path, ...]
    """Folders in them that are covered: installed packages."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links of the root folder, such as /lib -> usr/lib."""


@functools.cache
def find_runtime() -> Runtime:
    """The base interpreter of this one, without any virtual environment. Raises `UserError` if it does not run."""
    interpreter = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    paths = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix})
    library = Path(os.path.realpath(paths["stdlib"]))
    extensions = Path(os.path.realpath(sysconfig.get_config_var("DESTSHARED") or library / "lib-dynload"))
    try:
        listed = subprocess.run(
            [interpreter, "-I", "-S", "-c", _MAPPED, extensions],
            capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"The Python that would run code in the sandbox, {interpreter}, does not run: {error}.",
            "Mend that installation, or use another Python for Rollstream.",
        ) from error
    shared = {Path(line).parent for line in listed.stdout.splitlines()}
    loaders = {path for path in map(Path, ("/lib64", "/lib", "/usr/lib64")) if any(path.glob("ld-linux*"))}
    wanted = {interpreter, library, extensions, *shared, *(path.resolve() for path in loaders)}
    trees = tuple(sorted(path for path in wanted if not any(other in path.parents for other in wanted)))
    hidden = tuple(
        path
        for tree in trees
        for name in ("site-packages", "dist-packages")
        for path in (tree / name, library / name)
        if path.is_dir() and (path == tree / name or tree in path.parents)
    )
    links = tuple(
        (os.readlink(path), path) for path in ("/lib", "/lib64", "/bin") if os.path.islink(path)
    )  # as systems with a merged /usr have them; the loader's path goes through one
    return Runtime(interpreter, trees, tuple(dict.fromkeys(hidden)), links)


def supervisor_source() -> str:
    """`inside.py`."""
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")


@functools.cache
def compiled_supervisor() -> bytes:
    """`inside.py` as the bytes of a .pyc file: to compile it in each sandbox would cost more than to start it."""
    code = compile(supervisor_source(), "supervisor", "exec", dont_inherit=True, optimize=2)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def seen_by_others(path: Path) -> bool:
    """Whether a user without any right on it can go to `path` and read it."""
    try:
        return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents) and bool(
            path.stat().st_mode & stat.S_IROTH
        )
    except OSError:
        return False
