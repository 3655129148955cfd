"""What all messages share: fields that are checked when built, a type's name, an id."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from schemas.errors import MalformedMessage
from schemas.fields import Codec, FloatArray, IntArray, Segments, integer
from schemas.ids import GROUP_ID_MAX, INDEX_MAX, sample_id


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Message:
    """The base of all messages: checks its fields when built, compares by value."""

    TYPE: ClassVar[str] = ""
    TYPE_VERSION: ClassVar[int] = 1
    _codecs: ClassVar[dict[str, Codec]] = {}

    def __post_init__(self) -> None:
        for name, codec in self._codecs.items():
            try:
                object.__setattr__(self, name, codec.check(getattr(self, name)))
            except MalformedMessage as error:
                raise MalformedMessage(f"{self.TYPE}.{name} {error.reason}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and type(self) is type(other) and self.packed() == other.packed()

    def __hash__(self) -> int:
        return hash((self.TYPE, self.id))

    @property
    def id(self) -> str:
        """The id under which readers drop duplicates within a stream."""
        raise NotImplementedError

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version in the message, for the headers; None if it has none."""
        return None

    def packed(self) -> dict[str, Any]:
        """The fields as plain msgpack values."""
        return {name: codec.pack(getattr(self, name)) for name, codec in self._codecs.items()}

    @classmethod
    def unpacked(cls, fields: dict[Any, Any]) -> Self:
        """The message with these packed fields. Raises `MalformedMessage`."""
        values: dict[str, Any] = {}
        for name, codec in cls._codecs.items():
            if name in fields:
                try:
                    values[name] = codec.unpack(fields[name])
                except MalformedMessage as error:
                    raise MalformedMessage(f"{cls.TYPE}.{name} {error.reason}") from None
        try:
            return cls(**values)
        except TypeError as error:  # a field without a default is missing
            raise MalformedMessage(f"{cls.TYPE}: {error}") from None


TYPES: dict[str, type[Message]] = {}


def register(cls: type[Message]) -> type[Message]:
    """Class decorator: `cls` becomes a type of message that can be decoded."""
    cls._codecs = {field.name: field.metadata["codec"] for field in dataclasses.fields(cls)}
    TYPES[cls.TYPE] = cls
    return cls


def covers(pairs: Segments, tokens: int, name: str) -> None:
    """Check that the segments cover all tokens. Raises `MalformedMessage`."""
    if sum(count for _, count in pairs) != tokens:
        raise MalformedMessage(f"{name} cover {sum(count for _, count in pairs)} tokens of {tokens}")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Sample(Message):
    """What all messages about one sample share."""

    group_id: int = integer(0, GROUP_ID_MAX)
    index: int = integer(0, INDEX_MAX)

    @property
    def sample_id(self) -> str:
        """`"<group_id>-<index>"`."""
        return sample_id(self.group_id, self.index)

    @property
    def id(self) -> str:
        """The sample's id: a sample has one message of each type."""
        return self.sample_id


def same_length(tokens: IntArray, logprobs: FloatArray, name: str) -> None:
    """Check that each token has its logprob. Raises `MalformedMessage`."""
    if len(tokens) != len(logprobs):
        raise MalformedMessage(f"{name} has {len(tokens)} tokens and {len(logprobs)} logprobs")
