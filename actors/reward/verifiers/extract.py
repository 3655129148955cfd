"""Finds the final answer in a reply, and the right one in the data row: what most built-in functions begin with."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Where = Literal["whole", "boxed", "last_number", "hashes", "tag", "last_line"]
WHERES: tuple[Where, ...] = get_args(Where)

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
NUMBER_OR_FRACTION = re.compile(
    # a '-' after a word or a number is a minus between two terms, not a sign: "5-3" ends with 3
    r"(?P<sign>(?:(?<=[=(] )[-−] |(?<![\w.)\]}^])(?<!\^\{)[-+−–])(?:\\?[$£€])?)?"
    # nor is the 2 of m^2 or m^{-2} a number
    r"(?<![\w.^])(?<!\^\{)(?<!\^[-−])(?<!\^\{[-−])(?:(?P<whole>\d{1,9}) (?=\d{1,9}\s?/\s?\d))?"
    rf"(?P<number>{NUMBER})(?P<exponent>[eE][-+]?\d{{1,3}}(?!\d))?"
    r"(?:\s?(?:[x×*·]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?\{?(?P<power>[-−]?\d{1,3})(?!\d)\}?)?"
    rf"(?:\s?/\s?(?P<denominator>{NUMBER}))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s?(?:\{\s?(-?\d{1,40})\s?\}|(\d))\s?(?:\{\s?(\d{1,40})\s?\}|(\d))")
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-z])\s*(?:\{|(?<=\s)(?P<bare>[^\s{}$.,;\\]+))")
_TAG = ("<answer>", "</answer>")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The options of all functions that compare a reply with the row's answer."""

    extract: Where = "whole"
    """Where in the reply the answer is: `boxed` (the last `\\boxed{}`), `last_number`, `hashes` (behind the last
    `####`), `tag` (the last `<answer>...</answer>`), `last_line`."""
    extract_answer: Where = "whole"
    """Where it is in the row's answer: GSM8K's ends with `#### 72`, MATH's solution has it boxed."""
    answer_key: str = "answer"
    """Which entry of the row holds the answer."""
    after: str | None = None
    """Only what stands behind the last such mark counts, such as `</think>`; a reply without it has no answer."""

    def reply(self, response: str) -> str | None:
        """The answer in a reply; None if it has none there."""
        said = behind(response, self.after)
        return None if said is None else extract(said, self.extract)

    def answer(self, task: Mapping[str, Any]) -> str:
        """The right answer. Raises `ValueError` if the row has none."""
        answer = task.get(self.answer_key)
        if answer is None:
            raise ValueError(f"the data row has no '{self.answer_key}' to compare with")
        found = extract(str(answer), self.extract_answer)
        if found is None:
            raise ValueError(f"the answer {str(answer)[-40:]!r} has nothing at '{self.extract_answer}'")
        return found


def behind(response: str, mark: str | None) -> str | None:
    """What stands behind the last `mark`; None if it is not there. All, if no mark is asked for."""
    if not mark:
        return response
    _, found, said = response.rpartition(mark)
    return said if found else None


def extract(text: str, where: Where) -> str | None:
    """What `text` gives as its final answer there; None if nothing does."""
    match where:
        case "whole":
            return text
        case "boxed":
            return _last_boxed(text)
        case "last_number":
            match = last_match(text)
            return match[0] if match else None
        case "hashes":
            _, marker, tail = text.rpartition("####")
            return tail.strip().partition("\n")[0].strip() if marker else None
        case "tag":
            end = text.rfind(_TAG[1])
            begin = text.rfind(_TAG[0], 0, max(end, 0))
            return text[begin + len(_TAG[0]) : end].strip() if begin >= 0 else None
        case "last_line":
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[-1] if lines else None


def last_match(text: str) -> re.Match[str] | None:
    r"""The last number in `text`, of which a fraction is one, as `3/4`, `1 3/4` or `\frac{3}{4}`."""
    match = None
    for match in NUMBER_OR_FRACTION.finditer(_FRACTION.sub(_plain_fraction, text)):  # noqa: B007  # the last one is wanted
        pass
    return match


def _plain_fraction(found: re.Match[str]) -> str:
    behind_number = found.string[found.start() - 1 : found.start()].isdecimal()
    return f"{' ' if behind_number else ''}{found[1] or found[2]}/{found[3] or found[4]}"


def _last_boxed(text: str) -> str | None:
    """What stands in the last box whose braces close. One pass over the text, however many boxes it opens."""
    closes: dict[int, int] = {}  # where a brace's inside begins: where it ends
    opened: list[int] = []
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened:
            closes[opened.pop()] = brace.start()
    found = None
    for box in _BOX.finditer(text):
        if box["bare"] is not None:
            found = box["bare"]
        elif box.end() in closes:
            found = text[box.end() : closes[box.end()]]
    return found
