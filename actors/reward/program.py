"""Finds the program in a reply."""

import re
from typing import Literal, TypeAlias

Where: TypeAlias = Literal["fenced", "whole"]

_FENCE = re.compile(r"( {0,16})(`{3,}|~{3,})[ \t]*([^`\n]*)$")  # indented within lists, and all of the block with it
_PYTHON = {"python", "py", "python3", "py3"}


def find_program(reply: str, where: Where = "fenced") -> str | None:
    """The last fenced block that is marked as Python, or else the last one of all; None if there is none.

    With `whole` the reply itself is the program.
    """
    return reply if where == "whole" else find_block(reply, _PYTHON)


def find_block(reply: str, languages: set[str]) -> str | None:
    """The last fenced block that is marked as one of `languages`, or else the last one of all; None if there is none.

    A fence that is not closed is no block: the reply was cut.
    """
    last: str | None = None
    last_marked: str | None = None
    fence = language = indent = ""
    body: list[str] = []
    for line in reply.split("\n"):
        match = _FENCE.match(line.rstrip("\r"))
        if not fence:
            if match:
                indent, fence, marks = match[1], match[2], match[3].split()
                language, body = marks[0].lower() if marks else "", []
        elif match and match[2].startswith(fence) and not match[3].strip() and len(match[1]) <= len(indent) + 3:
            last = "\n".join(body)
            if language in languages:
                last_marked = last
            fence = ""
        else:
            cut = min(len(indent), len(line) - len(line.lstrip(" ")))
            body.append(line[cut:])
    return last if last_marked is None else last_marked
