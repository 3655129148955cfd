"""`exact`: the reply is the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.reward.verifiers import RewardFunction, Setting
from actors.reward.verifiers.extract import AnswerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AnswerOptions):
    """How texts are compared; by default only white space at their ends is forgiven."""

    ignore_case: bool = False
    ignore_space: bool = False
    """Any run of white space counts as one blank."""


def load(options: Options, setting: Setting) -> RewardFunction:
    """The function."""

    def plain(text: str) -> str:
        text = " ".join(text.split()) if options.ignore_space else text.strip()
        return text.casefold() if options.ignore_case else text

    def exact(response: str, task: Mapping[str, Any]) -> float:
        """1.0 if the reply's answer is the row's; else 0.0."""
        answer, found = options.answer(task), options.reply(response)
        return float(found is not None and plain(found) == plain(answer))

    return exact
