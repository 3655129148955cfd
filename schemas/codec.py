"""Messages to bytes and back.

On the wire a message is the msgpack array `[type, type version, {field: value}]`. Unknown fields are ignored and
missing ones take their defaults, so fields can be added; a changed meaning is a new type version with an upcaster, so
every program reads what older ones wrote (`schemas.upcast`).
Decoding bounds every length before it allocates, since bytes come from other machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from schemas.errors import MalformedMessage
from schemas.fields import DATA_ITEMS_MAX
from schemas.messages import Message
from schemas.upcast import to_current

PAYLOAD_BYTES_MAX = 8_000_000  # below the 8 MB `max_payload` that we give the server
CONTAINERS_MAX = 1 << 15  # lists and maps in one message; an empty one is a byte on the wire and 64 in memory


def encode(message: Message) -> bytes:
    """The bytes of a message.

    Raises:
        MalformedMessage: it is larger than `PAYLOAD_BYTES_MAX`.
    """
    packed: bytes = msgpack.packb([message.TYPE, message.TYPE_VERSION, message.packed()])
    if len(packed) > PAYLOAD_BYTES_MAX:
        raise MalformedMessage(f"{message.TYPE} {message.id} has {len(packed)} bytes; the limit is {PAYLOAD_BYTES_MAX}")
    return packed


def decode(payload: bytes) -> Message:
    """The message in `payload`, checked.

    Raises:
        MalformedMessage: the bytes are no message that this version of the code knows.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise MalformedMessage(f"the payload has {len(payload)} bytes; the limit is {PAYLOAD_BYTES_MAX}")
    try:
        # Array and map lengths are bounded, or nested headers that promise millions of items would allocate gigabytes.
        count = _counter()
        envelope: Any = msgpack.unpackb(
            payload, max_array_len=DATA_ITEMS_MAX, max_map_len=DATA_ITEMS_MAX, list_hook=count, object_hook=count
        )
    except MalformedMessage:
        raise
    except Exception as error:  # msgpack raises a dozen kinds, UnicodeDecodeError and StackError among them
        raise MalformedMessage(f"not msgpack: {type(error).__name__} {error}") from None
    if not isinstance(envelope, list) or len(envelope) != 3:
        raise MalformedMessage("not an envelope [type, version, fields]")
    kind, fields = to_current(*envelope)
    return kind.unpacked(fields)


def _counter() -> Callable[[Any], Any]:
    """A hook that lets `CONTAINERS_MAX` containers pass."""
    left = CONTAINERS_MAX

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise MalformedMessage(f"has more than {CONTAINERS_MAX} lists and maps")
        return container

    return count
