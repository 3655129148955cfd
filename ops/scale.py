"""`rollstream scale`: ask a run's launcher for another number of workers, and tell what it did."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from bus.port import Bus
from bus.table import CONTROL
from ops.folders import check_together, check_up, find_folder
from ops.host import ROLES, Role
from ops.launch import locate, start_of
from ops.recipe import Recipe
from ops.workers import SCALABLE, fewest, read_wanted
from schemas import Control, UserError

MOST = 1024
ANSWER_S = 15.0  # for the launcher to obey: it beats once a second
HOW = "Write ROLE=N, for instance rollout=4."
WHY_NOT = {
    "controller": "A run has one active controller; `rollstream up controller` adds a standby.",
    "trainer": "Its ranks are fixed when it starts: stop the run and resume it with trainer.ranks=N.",
}


def parse(arguments: Sequence[str]) -> tuple[str | None, dict[Role, int]]:
    """The run, None for the newest, and the numbers in `["my-run", "rollout=4"]`. Raises `UserError`."""
    named = [argument for argument in arguments if "=" not in argument]
    asked = [argument.partition("=") for argument in arguments if "=" in argument]
    if len(named) > 1:
        raise UserError(f"{named[1]!r} is no number of workers.", HOW)
    if not asked:
        raise UserError("It is not told how many workers of which role.", HOW)
    workers: dict[Role, int] = {}
    for name, _, count in asked:
        role = next((role for role in SCALABLE if role == name), None)
        if role is None:
            what = "cannot be scaled" if name in ROLES else "is no role"
            raise UserError(
                f"{name} {what}.", WHY_NOT.get(name, f"Scale {', '.join(SCALABLE[:-1])} or {SCALABLE[-1]}.")
            )
        if role in workers:
            raise UserError(f"{role} is given twice.", "Give each role once.")
        if not count.isdecimal() or int(count) > MOST:
            raise UserError(f"{role}={count} is no number of workers.", f"Give a number from 0 to {MOST}.")
        workers[role] = int(count)
    return (named[0] if named else None), workers


async def main(arguments: Sequence[str], url: str | None = None, run_name: str | None = None) -> int:
    """Carry the command out; returns the exit status. Raises `UserError`: what is wrong, and what to do."""
    from bus.jetstream import JetStreamBus

    target, workers = parse(arguments)
    check_together(url, run_name)
    where = locate(find_folder(target) if run_name is None else None, run_name, url)
    if run_name is None:
        await check_up(where.run, where.url, where.folder)
    bus = JetStreamBus(where.run, where.url, "scale")
    await bus.connect()
    try:
        for line in await scale(bus, workers):
            print(line)
    finally:
        await bus.close()
    return 0


async def scale(bus: Bus, workers: Mapping[Role, int], answer_s: float = ANSWER_S) -> list[str]:
    """Ask for so many workers; returns what was done, a sentence for each role.

    Raises:
        UserError: there is no such run, it has ended, it cannot have so few, or nobody obeyed within `answer_s`.
    """
    recipe = Recipe.from_yaml((await start_of(bus, bus.run)).recipe)
    newest = await bus.last(CONTROL)
    if newest is not None and _is_end(newest.message(), recipe.steps):
        raise UserError(
            f"The run {bus.run} has ended: all {recipe.steps} steps are done.", "Resume it with more steps."
        )
    if "episode" in workers and recipe.episode is None:
        raise UserError(f"The run {bus.run} has no episodes.", "Scale rollout or reward.")
    for role, count in workers.items():
        if count < fewest(recipe, role):
            raise UserError(
                f"{role}={count} is fewer than the {fewest(recipe, role)} that share the controller's process.",
                "Leave them, or resume the run with processes=separate.",
            )
    before = (await read_wanted(bus)).workers
    asked = {str(role): float(count) for role, count in workers.items()}
    ack = await bus.publish(Control(action="scale", nonce=secrets.token_hex(8), workers=asked))
    beat = await _answer(bus, ack.seq, answer_s)
    if beat is None:
        raise UserError(
            f"The launcher of {bus.run} did not answer within {answer_s:.0f} s. The number is in the log and holds "
            "as soon as one is up.",
            "Is `rollstream run` alive on its machine? Go on with it by --resume; other machines join by "
            "`rollstream up`.",
        )
    host = str(beat.get("process", "")).rpartition(":")[0]
    return [_told(role, count, before.get(role, count), beat, host) for role, count in workers.items()]


def _is_end(message: object, steps: int) -> bool:
    return isinstance(message, Control) and message.action == "stop" and message.nonce == f"end-{steps}"


async def _answer(bus: Bus, seq: int, answer_s: float) -> Mapping[str, Any] | None:
    """The first beat of the launcher that has obeyed the log up to `seq`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(answer_s), contextlib.aclosing(bus.beats()) as beats:  # type: ignore[type-var]
            async for beat in beats:
                if int(beat.get("control_seq") or 0) >= seq:
                    return beat
    return None


def _told(role: Role, count: int, before: int, beat: Mapping[str, Any], host: str) -> str:
    leaving = int(beat.get(f"{role}_leaving") or 0)
    handing = f"; {leaving} still hand their work over" if leaving else ""
    change = f"{count} as before" if count == before else f"{before} -> {count}"
    return f"{role}: {change} on {host}{handing}"
