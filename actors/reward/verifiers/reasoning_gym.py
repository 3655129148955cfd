"""`reasoning_gym`: the verifier of the reasoning-gym task that the row comes from (`data.train: reasoning_gym:TASK`).

The row carries the problem with all that its verifier needs, as JSON text. Making it again from its seed would not do:
some tasks make another problem of the same seed in another process, since they go through sets of text.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.reward.verifiers import RewardFunction, Setting
from actors.reward.verifiers.extract import Where, behind, extract
from schemas.errors import UserError

Scorer = Callable[[str, dict[str, Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where the answer is."""

    extract: Where = "whole"
    """Where in the reply it is: `tag` is `<answer>...</answer>`; see `AnswerOptions`."""
    after: str | None = None
    """As of `AnswerOptions`: only what stands behind the last such mark counts."""


def package() -> Any:
    """The package reasoning-gym. Raises `UserError` if it is not installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            "Tasks of reasoning-gym need the package reasoning-gym, which is not installed.",
            "Run: pip install 'rollstream[gym]'.",
        ) from error
    return reasoning_gym


def packed(entry: Mapping[str, Any]) -> str:
    """A problem as its task made it, as text. Raises `TypeError` or `ValueError` if it is no plain data."""
    return json.dumps({key: entry[key] for key in ("question", "answer", "metadata")})


def unpacked(text: str, tuples: bool) -> dict[str, Any]:
    """The problem in `text`; JSON has no tuples, so all lists may have to become some."""
    entry: dict[str, Any] = json.loads(text)
    return {key: _as_tuples(value) for key, value in entry.items()} if tuples else entry


def _as_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_as_tuples, value))
    return {key: _as_tuples(item) for key, item in value.items()} if isinstance(value, dict) else value


def load(options: Options, setting: Setting) -> RewardFunction:
    """The function. Raises `UserError` if the package is not installed."""
    gym = package()
    scorers: dict[str, Scorer] = {}

    def reasoning_gym(response: str, task: Mapping[str, Any]) -> dict[str, float]:
        """What the task's verifier gives, from 0 to 1; 0 for an empty answer, which some of them give part marks.

        The part `unreadable` is 1 where the verifier failed on the answer, which earns nothing. With the right answer
        it worked when the row was made, so it is the answer's fault.
        """
        name = task.get("reasoning_gym")
        if not isinstance(name, str):
            raise ValueError("the data row is of no reasoning-gym task")
        entry = unpacked(task["entry"], bool(task.get("tuples")))
        said = behind(response, options.after)
        answer = None if said is None else extract(said, options.extract)
        if answer is None or not answer.strip():
            return {"reward": 0.0, "unreadable": 0.0}
        scorer = scorers.setdefault(name, scorers.get(name) or gym.get_score_answer_fn(name))
        try:
            return {"reward": float(scorer(answer.strip(), entry)), "unreadable": 0.0}
        except Exception:
            return {"reward": 0.0, "unreadable": 1.0}

    return reasoning_gym
