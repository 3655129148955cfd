"""A session as the log has it: what was asked, whether it was answered, and what the agent did besides."""

from __future__ import annotations

import itertools

from actors.episode.endpoint.session import Notes, Recorded
from bus.port import Bus
from bus.table import ANSWERS, NOTES, TURNS
from schemas import Note, Prompt, Turn

GAP_MAX = 16  # questions in a row that were refused before they came to the log


async def recorded_questions(bus: Bus, sample: str) -> list[Recorded | None]:
    """What was asked on behalf of a sample, in order; None in the place of what was refused before it was asked."""
    found: list[Recorded | None] = []
    missing = 0
    for number in itertools.count():
        turns: list[Turn] = []
        for choice in itertools.count():
            entry = await bus.last(TURNS, f"{sample}/0-{number}-{choice}")
            if entry is None:
                break
            turn = entry.message()
            assert isinstance(turn, Turn)
            turns.append(turn)
        if not turns:
            missing += 1
            if missing > GAP_MAX:
                return found
            continue
        found += [None] * missing
        missing = 0
        answered = [await bus.last(ANSWERS, turn.id) is not None for turn in turns]
        first = turns[0]
        found.append(
            Recorded(
                prompt_tokens=tuple(first.prompt_tokens.tolist()),
                max_new_tokens=first.max_new_tokens,
                stop=tuple(first.stop),
                n=len(turns),
                context=first.context or {},
                answered=all(answered),
            )
        )
    raise AssertionError("numbers do not end")


async def recorded_notes(bus: Bus, sample: str) -> list[Note]:
    """What an agent from outside did in the session of a sample, in order."""
    notes: list[Note] = []
    while (entry := await bus.last(NOTES, f"{sample}/{len(notes)}")) is not None:
        note = entry.message()
        assert isinstance(note, Note)
        notes.append(note)
    return notes


def note_writer(bus: Bus, prompt: Prompt, known: int) -> Notes:
    """Puts notes on the log, behind those that are known; one at a time. A number is used once its note stands there:
    the next life reads to the first that is missing."""
    number, sure = known, True

    async def write(kind: str, value: float | None, place: tuple[int, int] | None, detail: str) -> None:
        nonlocal number, sure
        turn, choice = place or (-1, 0)
        while not sure:  # the bus failed: the note may stand there, or not
            sure = await bus.last(NOTES, f"{prompt.sample_id}/{number}") is None
            number += not sure
        note = Note(
            group_id=prompt.group_id,
            index=prompt.index,
            number=number,
            kind=kind,  # type: ignore[arg-type]  # checked by the message itself
            value=value,
            turn=turn,
            choice=choice,
            detail=detail,
        )
        sure = False
        await bus.publish(note)
        number, sure = number + 1, True

    return write
