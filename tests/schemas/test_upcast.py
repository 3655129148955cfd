"""Recordings outlive the programs that made them: every newer program must read them, and an older one say why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import msgpack
import pytest

from bus.port import Entry
from bus.table import Stream
from ops.raw_entries import fields_of
from schemas import MalformedMessage, Message, decode, encode
from schemas.fields import integer, string
from schemas.messages import TYPES
from schemas.upcast import UPCASTERS, to_current, upcaster

# A type with a history. Version 1 held `seconds` and `who`; version 2 counts milliseconds; version 3 renamed `who`.


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Greeting(Message):
    TYPE: ClassVar[str] = "greeting"
    TYPE_VERSION: ClassVar[int] = 3
    milliseconds: int = integer()
    name: str = string(20)
    mood: str = string(20, "calm")


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Greeting, "_codecs", {f.name: f.metadata["codec"] for f in dataclasses.fields(Greeting)})
    monkeypatch.setitem(TYPES, "greeting", Greeting)
    known = dict(UPCASTERS)

    @upcaster("greeting", 1)
    def _in_milliseconds(fields: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in fields.items() if name != "seconds"}
        return {**rest, "milliseconds": 1000 * fields["seconds"]}

    @upcaster("greeting", 2)
    def _name_not_who(fields: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in fields.items() if name != "who"}
        return {**rest, "name": fields["who"]}

    yield
    UPCASTERS.clear()
    UPCASTERS.update(known)


OF_VERSION = {
    1: {"seconds": 2, "who": "Ada"},
    2: {"milliseconds": 2000, "who": "Ada"},
    3: {"milliseconds": 2000, "name": "Ada"},
}


def test_every_type_has_a_way_from_each_of_its_old_versions() -> None:
    """Or the first reader of an old recording would find out."""
    for name, kind in TYPES.items():
        have = {version for of, version in UPCASTERS if of == name}
        assert have == set(range(1, kind.TYPE_VERSION)), name


@pytest.mark.usefixtures("history")
@pytest.mark.parametrize("version", OF_VERSION)
def test_every_old_version_becomes_the_current_message(version: int) -> None:
    """By the chain: nobody writes a function from each version to the newest."""
    packed = msgpack.packb(["greeting", version, OF_VERSION[version]])
    assert decode(packed) == Greeting(milliseconds=2000, name="Ada")
    assert msgpack.unpackb(encode(decode(packed)))[1] == 3


@pytest.mark.usefixtures("history")
@pytest.mark.parametrize("version", OF_VERSION)
def test_raw_readers_see_the_current_fields_too(version: int) -> None:
    """The audit builds no messages; it must not take old fields for new ones."""
    entry = Entry(Stream("greetings"), 1, "", {}, msgpack.packb(["greeting", version, OF_VERSION[version]]))
    assert fields_of(entry) == OF_VERSION[3]


@pytest.mark.usefixtures("history")
def test_a_version_of_the_future_is_refused_with_both_numbers() -> None:
    """A new meaning read as an old one would be worse than nothing."""
    packed = msgpack.packb(["greeting", 4, OF_VERSION[3]])
    for read in (decode, lambda data: fields_of(Entry(Stream("greetings"), 1, "", {}, data))):
        with pytest.raises(MalformedMessage, match=r"version 4, of a newer Rollstream; this one reads up to version 3"):
            read(packed)


@pytest.mark.usefixtures("history")
@pytest.mark.parametrize(
    ("version", "fields"),
    [
        (1, {}),
        (1, {"seconds": None, "who": 5}),
        (1, {"seconds": 2}),
        (2, {"seconds": 2}),
        (2, {5: 6}),
        (3, {}),
        (1, []),
    ],
)
def test_fields_that_are_not_of_their_version_are_malformed(version: int, fields: Any) -> None:
    """Upcasters meet bytes from outside before any check."""
    with pytest.raises(MalformedMessage):
        decode(msgpack.packb(["greeting", version, fields]))


@pytest.mark.usefixtures("history")
@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None])
def test_what_is_no_version_is_malformed(version: Any) -> None:
    with pytest.raises(MalformedMessage):
        decode(msgpack.packb(["greeting", version, OF_VERSION[1]]))


@pytest.mark.usefixtures("history")
def test_the_given_fields_stay_as_they_are() -> None:
    """Readers keep them: the same bytes are read again for another purpose."""
    fields = dict(OF_VERSION[1])
    to_current("greeting", 1, fields)
    assert fields == OF_VERSION[1]
