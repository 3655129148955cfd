"""`regex`: the reply matches a pattern."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from actors.reward.verifiers import RewardFunction, Setting
from actors.reward.verifiers.extract import AnswerOptions
from actors.reward.verifiers.options import compiled

_ANSWER = "{answer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AnswerOptions):
    """The pattern, in Python's syntax. `{answer}` in it stands for the row's answer, taken literally."""

    pattern: str
    match: Literal["search", "full"] = "search"
    group: str | None = None
    """A group of the pattern that must be the row's answer, but for white space at its ends; of the last match."""
    ignore_case: bool = False
    dotall: bool = False
    """Whether `.` matches the end of a line."""
    multiline: bool = False
    """Whether `^` and `$` match at lines."""

    @property
    def flags(self) -> int:
        """As `re` wants them."""
        flags = [(self.ignore_case, re.I), (self.dotall, re.S), (self.multiline, re.M)]
        return sum(flag for wanted, flag in flags if wanted)

    def __post_init__(self) -> None:
        groups = compiled(self.pattern.replace(_ANSWER, "x"), self.flags, shown=self.pattern)
        if self.group is not None and self.group not in {*groups.groupindex, *map(str, range(groups.groups + 1))}:
            raise ValueError(f"the pattern has no group {self.group} => Name a group by its name or number.")


def load(options: Options, setting: Setting) -> RewardFunction:
    """The function. A pattern that backtracks for ever ends at `reward.timeout_s`, by a kill."""
    fixed = re.compile(options.pattern, options.flags) if _ANSWER not in options.pattern else None
    group: str | int | None = options.group
    if isinstance(group, str) and group.isdecimal():
        group = int(group)

    def regex(response: str, task: Mapping[str, Any]) -> float:
        """1.0 if the reply matches, and the group is the answer if one is named; else 0.0."""
        reply = options.reply(response)
        pattern = fixed or re.compile(options.pattern.replace(_ANSWER, re.escape(options.answer(task))), options.flags)
        answer = options.answer(task).strip() if group is not None else ""
        if reply is None:
            return 0.0
        if options.match == "full":
            found = pattern.fullmatch(reply)
        else:
            found = None
            for found in pattern.finditer(reply):  # noqa: B007  # the last one is wanted
                if group is None:
                    break
        return float(found is not None and (group is None or (found[group] or "").strip() == answer))

    return regex
