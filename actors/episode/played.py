"""One run of an episode's function, and what went wrong in it, in words: the same in training and in evaluation."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable

from actors.episode.builtin import Episode
from actors.episode.policy import Bound, FailedElsewhere, Policy
from actors.episode.trajectory import EmptyTrajectory, Trajectory
from actors.lines import their_line
from schemas import MalformedMessage, Prompt


async def played(function: Episode, prompt: Prompt, policy: Policy, cut: Callable[[str], None]) -> Trajectory:
    """What the function made of the prompt. One that comes to its bounds is cut, and `cut` is told why.

    Raises:
        EmptyTrajectory: it was cut before the model had said anything.
        Exception: whatever the function raised; an exit or a cancellation of its own as a `RuntimeError`.
    """
    try:
        outcome = await function.run(prompt, policy)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("it was cancelled from within") from None  # or its sample would end without a word
    except SystemExit as error:
        raise RuntimeError(f"it called exit({error.code})") from error  # or it would take all episodes along
    except Bound as bound:
        cut(str(bound))
        if not policy.said:
            raise EmptyTrajectory(str(bound)) from None
        return policy.trajectory(finish="length")
    return outcome if isinstance(outcome, Trajectory) else policy.trajectory(reward=outcome)


def in_words(error: Exception, place: str) -> str:
    """What went wrong, with the line of the user's file; where none led there, with the function, at `place`."""
    if isinstance(error, FailedElsewhere):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = their_line((frame.filename, frame.lineno) for frame in frames) or (
        f"what {place} returned" if place else ""
    )
    what = "it cannot be stored" if isinstance(error, MalformedMessage) else type(error).__name__
    return f"{what}: {error}" + (f" ({where})" if where else "")
