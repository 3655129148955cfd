"""`choice`: the letter of a multiple choice."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from actors.reward.verifiers import RewardFunction, Setting
from actors.reward.verifiers.extract import AnswerOptions

# bounded everywhere: a reply of repeated marks must not take quadratic time
_WORD = r"[ \t]+(?!(?:because|since|as|for|which|due|and|but|by|not|instead)\b)[A-Za-z]"
"""Behind `a` or `I` it tells the word from the letter: "the answer is a matter of taste", "Answer: I think ..."."""
_LETTER = rf"[(\[{{{{*_]{{{{0,4}}}}(?![aiI]{_WORD})(?P<letter>[{{letters}}])(?![A-Za-z0-9'’])"
_STYLE = r"(?:\\(?:text|math)(?:bf|it|rm|tt|sf|normal)?\s?\{\s?)"
_SURE = r"(?:(?i:therefore|thus|then|so|clearly|simply|probably|likely|most likely|definitely)\s{1,4})?"
_RIGHT = r"(?i:(?:the )?(?:\w{1,12} )?(?:correct|right|best|answer|true))\b"
_REFUSED = rf"(?!\s{{1,4}}(?i:is|are|was|would be|seems)\s{{1,4}}(?!{_RIGHT}))"
"""Not behind a letter that is spoken about: "option A is wrong"; but "option A is the right answer"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AnswerOptions):
    """Which letters there are, and how the row says the right one."""

    letters: str = "ABCDEFGHIJ"
    answer_is: Literal["letter", "index", "text"] = "letter"
    """The row's answer: a letter, the number of a choice from 0 on, or a text among those in `choices_key`."""
    choices_key: str = "choices"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Z]{2,26}", self.letters) or len(set(self.letters)) < len(self.letters):
            raise ValueError(f"letters is {self.letters!r} => It must be 2 to 26 different capital letters.")


def load(options: Options, setting: Setting) -> RewardFunction:
    """The function."""
    letters = options.letters + options.letters.lower()
    letter = _LETTER.format(letters=letters)
    alone = re.compile(rf"{letter}[)\]}}.:*_\s]{{0,8}}")
    boxed = re.compile(rf"\\f?box(?:ed)?\s?\{{\s?{_STYLE}?{letter}")
    verb = r"(?:(?i:is|are|would be|must be)\b|:|=)"
    between = rf"[*_:\s]{{0,4}}{_SURE}"
    said = re.compile(
        rf"(?i:\b(?:answer|choice|option)\b)[*_\s]{{0,4}}{verb}{between}(?:(?i:option|choice)\s{{1,4}})?{letter}{_REFUSED}"
    )
    named = re.compile(rf"(?i:\b(?:answer|choice|option)\b)[*_:\s]{{0,4}}{letter}{_REFUSED}")
    marked = re.compile(
        rf"(?:\(|\*\*|^[ \t]{{0,4}})(?P<letter>[{options.letters}])(?:\)|\*\*|[.:](?=\s|$))", re.MULTILINE
    )
    last = re.compile(rf"(?<![A-Za-z0-9'’])(?P<letter>[{options.letters}])[.!]?\Z")

    def chosen(reply: str) -> str | None:
        """The letter that a reply settles on; the plainest way of saying it counts, and of those the last."""
        reply = reply.strip()
        if whole := alone.fullmatch(reply):
            return whole["letter"].upper()
        for pattern in (boxed, said, named, marked, last):
            found = None
            for found in pattern.finditer(reply):  # noqa: B007  # the last one is wanted
                pass
            if found is not None:
                return str(found["letter"]).upper()
        return None

    def right(task: Mapping[str, Any]) -> str:
        answer = options.answer(task).strip()
        if options.answer_is == "letter":
            if re.fullmatch(rf"[(]?[{letters}][).]?", answer):
                return answer.strip("().").upper()
            raise ValueError(f"the answer {answer[:40]!r} is none of the letters {options.letters}")
        if options.answer_is == "index":
            if answer.isdecimal() and int(answer) < len(options.letters):
                return options.letters[int(answer)]
            raise ValueError(f"the answer {answer[:40]!r} is no number of a choice from 0 on")
        choices = task.get(options.choices_key)
        texts = [str(text).strip() for text in choices] if isinstance(choices, list | tuple) else []
        if texts.count(answer) != 1 or texts.index(answer) >= len(options.letters):
            raise ValueError(f"the answer {answer[:40]!r} does not stand once among the row's '{options.choices_key}'")
        return options.letters[texts.index(answer)]

    def choice(response: str, task: Mapping[str, Any]) -> float:
        """1.0 if the reply settles on the right letter; else 0.0, also if it settles on none."""
        expected, reply = right(task), options.reply(response)
        return float(reply is not None and chosen(reply) == expected)

    return choice
