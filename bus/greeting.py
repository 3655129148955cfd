"""What the plain sockets of this package say to a NATS server first, and what a refusal of it means.

The client library does this for all else; `bus.bulk` and `bus.weights.wire` speak to the server without it.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import SplitResult, unquote

from schemas import UserError

REFUSED_REMEDY = "Give the user and password in the URL: nats://user:password@host:port."


def hello(credentials: SplitResult, name: str) -> bytes:
    """The `CONNECT` line, with its end; `credentials` is a server's URL with user and password, a token, or neither."""
    said: dict[str, Any] = {
        "verbose": False, "pedantic": False, "lang": "python", "version": "0", "protocol": 1, "headers": True,
        "no_responders": True, "name": name,
    }  # fmt: skip
    if credentials.password is not None:
        said |= {"user": unquote(credentials.username or ""), "pass": unquote(credentials.password)}
    elif credentials.username:
        said["auth_token"] = unquote(credentials.username)
    return b"CONNECT %s\r\n" % json.dumps(said).encode()


def complaint(line: bytes) -> str:
    """The text of an `-ERR` line. Raises `UserError` if it says that we may not."""
    text = line.removeprefix(b"-ERR").decode(errors="replace").strip(" '")
    if "authorization" in text.lower() or "permissions" in text.lower():
        raise UserError(f"The NATS server refused us: {text}.", REFUSED_REMEDY)
    return text
