"""Reading what older programs wrote: fields of an old type version, step by step to those of the current one.

A message gains fields with defaults freely; old bytes simply lack them. A changed meaning, a renamed or a removed field
is a new `TYPE_VERSION`, and one pure function here that turns the fields of the version before into the new ones:

    @upcaster("scored", 1)
    def _reward_in_percent(fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "reward": fields["reward"] / 100}

Functions get packed fields, as on the wire, and never change what they get. They stay for ever, as recordings do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from schemas.errors import MalformedMessage
from schemas.messages import TYPES, Message
from schemas.turns import Turn as Turn  # its module registers types

Upcast: TypeAlias = Callable[[dict[Any, Any]], dict[Any, Any]]


class NewerMessage(MalformedMessage):
    """A message of a type version that this program does not know yet: it says nothing about the sender's fault."""


UPCASTERS: Final[dict[tuple[str, int], Upcast]] = {}  # by type and by the version that they read


def upcaster(name: str, from_version: int) -> Callable[[Upcast], Upcast]:
    """Register a function that turns fields of `from_version` of a type into those of the next version."""

    def register(function: Upcast) -> Upcast:
        assert (name, from_version) not in UPCASTERS, f"{name} {from_version} has an upcaster"
        UPCASTERS[name, from_version] = function
        return function

    return register


def to_current(name: object, version: object, fields: object) -> tuple[type[Message], dict[Any, Any]]:
    """The class of a message, and its packed fields as the current version has them.

    Raises:
        NewerMessage: the version is newer than ours.
        MalformedMessage: the type is not known, or the fields are not of that version.
    """
    if type(name) is not str or type(version) is not int or version < 1 or type(fields) is not dict:
        raise MalformedMessage("not an envelope [type, version, fields]")
    kind = TYPES.get(name)
    if kind is None:
        raise MalformedMessage(f"unknown message type {name[:40]!r}")
    if version > kind.TYPE_VERSION:
        raise NewerMessage(
            f"{name} has version {version}, of a newer Rollstream; this one reads up to version {kind.TYPE_VERSION}"
        )
    for old in range(version, kind.TYPE_VERSION):
        try:
            fields = UPCASTERS[kind.TYPE, old](fields)
        except MalformedMessage:
            raise
        except Exception as error:  # bytes from outside may lack anything, or hold other types
            raise MalformedMessage(f"{name} is not of version {old}: {type(error).__name__} {error}") from None
    return kind, fields
