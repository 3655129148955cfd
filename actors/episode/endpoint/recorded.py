"""A session as the log has it: what was asked, whether it was answered, and what the agent did besides."""

from __future__ import annotations

import itertools

from actors.episode.endpoint.session import Notes, Recorded
from bus.port import Bus
from bus.table import ANSWERS, NOTES, TURNS
from schemas import Note, Prompt, Turn


async def recorded_questions(bus: Bus, sample: str) -> list[Recorded]:
    """What was asked on behalf of a sample, in order."""
    found: list[Recorded] = []
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
            return found
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
    """Puts notes on the log, behind those that are known."""
    numbers = itertools.count(known)

    async def write(kind: str, value: float | None, place: tuple[int, int] | None, detail: str) -> None:
        turn, choice = place or (-1, 0)
        note = Note(
            group_id=prompt.group_id,
            index=prompt.index,
            number=next(numbers),
            kind=kind,  # type: ignore[arg-type]  # checked by the message itself
            value=value,
            turn=turn,
            choice=choice,
            detail=detail,
        )
        await bus.publish(note)

    return write
