"""Reads a map of options into the dataclass of a built-in function; whatever does not fit is told with what would.

The standard library only: the reward child reads them too, and must start fast.
"""

import difflib
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar

from schemas.errors import UserError, did_you_mean

T = TypeVar("T")


def read_options(
    kind: type[T], given: Mapping[str, Any], function: str, what: str = "reward function", section: str = "reward"
) -> T:
    """An instance of the dataclass `kind`; `what` the function is and the recipe's `section` are for the errors.

    Raises `UserError` for unknown names (with near ones), missing ones, values of another type, and whatever
    `__post_init__` of `kind` refuses by a `ValueError` (`reason => remedy`).
    """
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # it is a dataclass
    for name in given:
        if name not in known:
            raise UserError(f"The {what} '{function}' has no option {name}.", near(name, list(known)))
    types_of = typing.get_type_hints(kind)
    for name, field in known.items():
        if name in given and not fits(given[name], types_of[name]):
            wanted = in_words(types_of[name])
            raise UserError(
                f"The option {name} of the {what} '{function}' is {brief(given[name])}.",
                f"It must be {wanted}.",
            )
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise UserError(
                f"The {what} '{function}' needs the option {name}.",
                f"Add {section}.options.{name}, {in_words(types_of[name])}.",
            )
    try:
        return kind(**given)
    except ValueError as error:
        reason, _, remedy = str(error).partition(" => ")
        raise UserError(f"The options of the {what} '{function}' do not fit: {reason}.", remedy) from None


def as_reason(error: UserError) -> str:
    """What a `ValueError` of `__post_init__` says, of another error: `reason => remedy`."""
    return f"{error.message.removesuffix('.')} => {error.remedy}"


def compiled(pattern: str, flags: int = 0, shown: str = "") -> re.Pattern[str]:
    """The regular expression of an option, `shown` as it is if not as it stands there. Raises `ValueError`."""
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"the pattern {shown or pattern!r} is none: {error} => Correct it.") from None


def near(name: str, known: list[str]) -> str:
    """A sentence that leads from a mistyped name to the right one."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return did_you_mean(close)
    return f"It has {', '.join(sorted(known))}." if known else "It takes no options."


def fits(value: Any, kind: Any) -> bool:
    """Whether a plain value is of this type; an integer is a float too, a boolean is neither."""
    if kind is Any:
        return True
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(fits(item, inner[0]) for item in value)
    if origin is dict or kind is dict:
        pairs = value.items() if isinstance(value, Mapping) else [(0, 0)]
        return all(isinstance(key, str) and (not inner or fits(item, inner[1])) for key, item in pairs)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def in_words(kind: Any) -> str:
    """A type as people say it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(in_words(one) for one in inner)
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin is tuple:
        return f"a list, each {in_words(inner[0])}"
    if origin is dict or kind is dict:
        return f"a map to {in_words(inner[1])}" if inner and inner[1] is not Any else "a map"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return names.get(kind, "a value")


def brief(value: Any) -> str:
    """A value in at most 60 characters."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
