"""Find a function that the user names in a recipe: `package.module:function` or `path/to/file.py:function`.

Imported by the reward child as well as by the launcher, so it must stay light: the standard library only.
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.reward.sources import Sources

from schemas.errors import UserError, did_you_mean


class FunctionNotFound(UserError):
    """A function named in a recipe does not exist, or the file that should hold it cannot be imported."""


def load_function(
    spec: str, base: Path | None = None, *, builtins: Iterable[str] = (), sources: "Sources | None" = None
) -> Callable[..., Any]:
    """The callable that `spec` names.

    `package.module:function` is imported; besides what is installed, the recipe's folder `base` and the current folder
    are searched, last, so that they shadow nothing. `path/to/file.py:function` is read from that file; a relative path
    starts at `base` (without one, at the current folder), and the file may import its neighbours.

    `builtins` are the short names that the caller understands; they only serve the suggestions in the error.
    `sources` reads the file, to note what was in it, or to run what it once held.
    Raises `FunctionNotFound`; its message names the spec, what was looked for and near misses, and what to do.
    """
    source, separator, name = spec.rpartition(":")
    if not separator or not source or not name:
        raise _unreadable(spec, builtins)
    if source.endswith(".py"):
        module = _module_from_file(spec, source, base, sources)
    else:
        module = _module_by_name(spec, source, base)
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]  # getattr of a module is Any
    where = module.__file__ or module.__name__
    if found is not None:
        raise FunctionNotFound(
            f"'{spec}': {name} in {where} is a {type(found).__name__}, not a function.", "Name a function."
        )
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise FunctionNotFound(f"'{spec}': {where} has no function {name}.", _suggest(name, own, "It has"))


def place_of(function: Callable[..., Any]) -> str:
    """`episode (task.py, line 12)`: where a function of the user's is, as far as that is known."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name} ({code.co_filename}, line {code.co_firstlineno})" if code is not None else name


def _unreadable(spec: str, builtins: Iterable[str]) -> FunctionNotFound:
    forms = "'package.module:function' or 'path/to/file.py:function'"
    names = list(builtins)
    if not names:
        return FunctionNotFound(f"'{spec}' names no function.", f"Write {forms}.")
    return FunctionNotFound(
        f"'{spec}' is no built-in function, nor {forms}.", _suggest(spec, names, "The built-in ones are")
    )


def _suggest(name: str, known: list[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return did_you_mean(near)
    return f"{otherwise}: {', '.join(sorted(known)[:12])}." if known else "Define it there, or correct the name."


def path_of(source: str, base: Path | None) -> Path:
    """The file that `path/to/file.py` names."""
    return ((base or Path.cwd()) / Path(source).expanduser()).resolve()


def _module_from_file(spec: str, source: str, base: Path | None, sources: "Sources | None") -> ModuleType:
    path = path_of(source, base)
    if not path.is_file() and not (sources and str(path) in sources.kept):
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=3)
        hint = f" {did_you_mean(near)}" if near else ""
        raise FunctionNotFound(
            f"'{spec}': there is no file {path}.", f"Give a path that is relative to the recipe's folder.{hint}"
        )
    _search_last(path.parent)
    # Named by its path, so that two files called rewards.py do not get in each other's way.
    name = f"_rollstream_{path.stem}_{sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = sources.of_file(name, path) if sources else importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None  # for every path that ends in .py there is a loader
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _broken(spec, path, error) from error
    return module


def _module_by_name(spec: str, source: str, base: Path | None) -> ModuleType:
    for folder in (base, Path.cwd()):
        if folder is not None:
            _search_last(folder.resolve())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source == error.name or source.startswith(f"{error.name}.")):
            raise _broken(spec, source, error) from error  # it exists, but imports something that does not
        raise FunctionNotFound(
            f"'{spec}': there is no module {error.name}, neither installed nor in {base or Path.cwd()}.",
            "Install it, correct the name, or name a file: 'path/to/file.py:function'.",
        ) from error
    except Exception as error:
        raise _broken(spec, source, error) from error


def _broken(spec: str, where: Path | str, error: Exception) -> FunctionNotFound:
    line = getattr(error, "lineno", None)  # a SyntaxError knows its line
    if line is None:
        line = next((f.lineno for f in reversed(extract_tb(error.__traceback__)) if f.filename == str(where)), None)
    at = f"{where}, line {line}" if line else str(where)
    return FunctionNotFound(
        f"'{spec}': importing {at} failed with {type(error).__name__}: {error}.",
        "Mend the file, or install what it needs.",
    )


def _search_last(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
