"""`rollstream reward reload`: have reward workers read the function's file anew, and tell what they did."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from bus.port import Bus
from bus.table import BEAT_EVERY_S
from ops.folders import check_together, find_folder, is_down, resuming
from ops.launch import locate, start_of
from ops.recipe import Recipe
from schemas import Control, UserError

LISTEN_S = 1.5 * BEAT_EVERY_S  # in which each worker is heard
SLACK_S = 10.0  # for an answer, beside the time that starting a reward process may take


async def main(target: str | None, url: str | None = None, run_name: str | None = None) -> int:
    """Carry the command out; 0 if all workers run the new function, 1 if one kept the old. Raises `UserError`."""
    from bus.jetstream import JetStreamBus

    check_together(url, run_name)
    where = locate(find_folder(target) if run_name is None else None, run_name, url)
    if run_name is None and await is_down(where.url):
        raise UserError(
            f"The run {where.run} is not up.",
            f"A run that begins reads the file: {resuming(where.folder)}",
        )
    bus = JetStreamBus(where.run, where.url, "reload")
    await bus.connect()
    try:
        recipe = Recipe.from_yaml((await start_of(bus, where.run)).recipe)
        lines, taken = await reload(bus, recipe.reward.start_timeout_s + SLACK_S)
    finally:
        await bus.close()
    for line in lines:
        print(line)
    return 0 if taken else 1


async def reload(bus: Bus, answer_s: float, listen_s: float = LISTEN_S) -> tuple[list[str], bool]:
    """Ask all reward workers; a sentence for each, and whether all took the new function.

    Raises `UserError` if there is no reward worker.
    """
    async with _heard(bus) as beats:
        await asyncio.sleep(listen_s)
        asked = sorted(beats)
        if not asked:
            raise UserError(
                f"No reward worker of {bus.run} is up.", "`rollstream status` tells who is; start one: `rollstream up`."
            )
        seq = (await bus.publish(Control(action="reload", nonce=secrets.token_hex(8)))).seq
        deadline_s = time.monotonic() + answer_s
        while _waited_for(beats, asked, seq) and time.monotonic() < deadline_s:
            await asyncio.sleep(BEAT_EVERY_S / 10)
        missing = _waited_for(beats, asked, seq)
        return [_told(name, beats[name], name in missing) for name in asked], not missing and not any(
            beats[name].get("reload_error") for name in asked
        )


@contextlib.asynccontextmanager
async def _heard(bus: Bus) -> AsyncIterator[dict[str, Mapping[str, Any]]]:
    """The newest beat of each reward worker that is up, by its name."""
    beats: dict[str, Mapping[str, Any]] = {}

    async def listen() -> None:
        async for beat in bus.beats():
            if beat.get("role") == "reward":
                beats[str(beat.get("actor"))] = beat

    task = asyncio.create_task(listen(), name="hears reward workers")
    try:
        yield beats
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _waited_for(beats: Mapping[str, Mapping[str, Any]], asked: list[str], seq: int) -> list[str]:
    """Who has not answered. A worker that has ended, or begun anew, has nothing to answer."""
    return [
        name for name in asked if beats[name].get("state") != "ended" and int(beats[name].get("reload_seq") or 0) < seq
    ]


def _told(name: str, beat: Mapping[str, Any], missing: bool) -> str:
    if missing:
        return f"{name}: no answer; the word is in the log, and it will read the file when it gets to it"
    if beat.get("state") == "ended":
        return f"{name}: has ended"
    if beat.get("reload_error"):
        return f"{name}: kept {beat.get('reward_digest')}: {beat['reload_error']}"
    before, after = beat.get("digest_before"), beat.get("reward_digest")
    return f"{name}: {after}, unchanged" if before == after else f"{name}: {before} -> {after}"
