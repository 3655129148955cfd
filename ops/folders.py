"""Run folders: how a new one is named, which one a person means, and whether its run is up."""

from __future__ import annotations

import asyncio
import difflib
import re
import time
import unicodedata
from pathlib import Path
from urllib.parse import urlsplit

from bus.table import RUN_NAME
from schemas import UserError
from schemas.errors import did_you_mean

RUNS = Path("runs")
START_ONE = "Start one: rollstream run RECIPE"
ELSEWHERE = "Give another place with --dir."
NEW_FOLDER = "Give a new folder with --out."
_STAMP = re.compile(r"-\d{8}-\d{6}$")


def new_folder(name: str, now_s: float | None = None) -> Path:
    """The folder for a new run of the recipe `name`: `runs/<name>-<yyyymmdd>-<hhmmss>`, a name no other run has."""
    now_s = time.time() if now_s is None else now_s
    while True:
        folder = RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}"
        if not folder.exists():
            return folder
        now_s += 1.0


def run_name_of(folder: Path) -> str:
    """The name of the run in a folder, the last part of its path. Raises `UserError` if it cannot be one."""
    name = folder.resolve().name
    if RUN_NAME.fullmatch(name):
        return name
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    usable = re.sub(r"[^a-z0-9]+", "-", plain)[:63].strip("-") or "run"
    raise UserError(
        f"{folder} cannot be a run's folder: its last part, {name!r}, is the run's name, which consists of lower-case "
        "letters, digits and '-', at most 63, the first not a '-'.",
        f"Take another one, such as {folder.with_name(usable)}.",
    )


def newest_folder(name: str | None = None) -> Path:
    """The newest run folder, of the recipe `name` if given. Raises `UserError` if there is none."""
    found = [
        path.parent for path in RUNS.glob("*/run.json") if name is None or _STAMP.sub("", path.parent.name) == name
    ]
    if not found:
        what = f"of {name} " if name else ""
        raise UserError(f"There is no run {what}in {RUNS.absolute()}.", START_ONE)
    return max(found, key=lambda folder: (folder / "run.json").stat().st_mtime)


def find_folder(target: str | None) -> Path:
    """The run folder that a person means: a path, a name below `runs/`, or by default the newest.

    Raises:
        UserError: there is no such run.
    """
    if target is None:
        return newest_folder()
    for folder in (Path(target), RUNS / target):
        if folder.is_dir():
            return folder
    raise UserError(f"There is no run {target!r}, neither as a path nor in {RUNS}/.", _known_runs(target))


def _known_runs(target: str = "") -> str:
    names = sorted(path.parent.name for path in RUNS.glob("*/run.json"))
    near = difflib.get_close_matches(target, names, n=1) or names[-3:]
    return did_you_mean(near) if near else START_ONE


def model_of(target: str) -> str:
    """The model that a person means: that of a finished run, by folder or name; else a model's own folder or hub name.

    Raises:
        UserError: the run has no model yet.
    """
    for folder in (Path(target), RUNS / target):
        if (folder / "run.json").exists():
            if not (folder / "model").is_dir():
                raise UserError(f"The run in {folder} has no model yet: it is written at the end.", "Let the run end.")
            return str(folder / "model")
    return target


def resuming(folder: Path) -> str:
    """The command that goes on with a run."""
    return f"rollstream run RECIPE --resume --dir {folder}"


def go_on(folder: Path) -> str:
    """The remedy for a run that is not up."""
    return f"Go on with it: {resuming(folder)}"


def check_together(nats: str | None, run_name: str | None, instead: str = "the run's folder") -> None:
    """Raises `UserError` if only one of the two options is given that name a run by its server."""
    if (nats is None) != (run_name is None):
        raise UserError("--nats and --run-name belong together.", f"Give both, or {instead}.")


async def is_down(url: str) -> bool:
    """Whether the run's own server is gone: on this machine that is known at once, without waiting for a time-out."""
    server = urlsplit(url)
    if "," in url or server.hostname not in ("127.0.0.1", "localhost", "::1"):
        return False
    try:
        _, writer = await asyncio.open_connection(server.hostname, server.port or 4222)
    except OSError:
        return True
    writer.close()
    return False


async def check_up(run: str, url: str, folder: Path) -> None:
    """Raises `UserError` if a run that is found by its folder has no server any more."""
    if await is_down(url):
        raise UserError(f"The run {run} is not up.", go_on(folder))
