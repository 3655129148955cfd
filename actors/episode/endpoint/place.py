"""Where a worker's endpoint is, in all its lives: its port and the secret of its keys, in a file of its user alone."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
from pathlib import Path
from typing import Protocol

from schemas import UserError

SECRET_BYTES = 32
BIND_S = 5.0  # how long the port of a former life may take to be free
AGAIN_S = 0.1


class Listens(Protocol):
    """What is to be bound."""

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port."""


class Place:
    """`port` is the one that the recipe says, 0: any, and from then on the same. Makes the file, if there is none."""

    def __init__(self, file: Path, port: int) -> None:
        self._file = file
        self._fixed = port
        self._port = port
        try:
            told = json.loads(file.read_text())
            self.secret = bytes.fromhex(told["secret"])
            self._port = port or int(told["port"])
        except FileNotFoundError:
            self.secret = secrets.token_bytes(SECRET_BYTES)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} cannot be read: {error}.", "Remove it; open sessions are lost by that.") from None

    async def listen(self, server: Listens, host: str) -> int:
        """Have the server listen here; returns the port. Raises `UserError`."""
        until_s = asyncio.get_running_loop().time() + BIND_S
        while True:
            try:
                port = await server.start(host, self._port)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise UserError(
                        f"The endpoint cannot listen on {host}: {error.strerror or error}.",
                        "Correct episode.endpoint.host.",
                    ) from None
                if asyncio.get_running_loop().time() > until_s:
                    raise UserError(
                        f"The port {self._port} of {host}, on which the endpoint is to listen, is taken.",
                        "End what listens there, or set episode.endpoint.port to another; 0 takes a free one."
                        if self._fixed
                        else f"End what listens there, or remove {self._file}: open sessions are lost by that.",
                    ) from None
                await asyncio.sleep(AGAIN_S)
        self._keep(port)
        return port

    def _keep(self, port: int) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        aside = self._file.with_suffix(".tmp")
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(json.dumps({"port": port, "secret": self.secret.hex()}))
        aside.replace(self._file)
