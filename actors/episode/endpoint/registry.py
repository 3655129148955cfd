"""The sessions of one process: found by key, handed out to external agents, remembered when they have ended."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict, deque

from actors.episode.endpoint.errors import ApiError, too_busy
from actors.episode.endpoint.session import Session

KEY_PREFIX = "sk-rollstream"
ENDED_MAX = 10_000  # keys whose end is remembered


def key_of(secret: bytes, sample_id: str) -> str:
    """The API key of a sample's session: nobody can guess it, and every life of the worker derives the same."""
    return f"{KEY_PREFIX}-{sample_id}-{_sign(secret, sample_id)}"


def is_key(secret: bytes, key: str) -> bool:
    """Whether `key` was made with `secret`, for whatever sample."""
    name, _, sign = key.removeprefix(f"{KEY_PREFIX}-").rpartition("-")
    return hmac.compare_digest(_sign(secret, name).encode(), sign.encode(errors="replace"))


def _sign(secret: bytes, name: str) -> str:
    return hmac.new(secret, name.encode(errors="replace"), hashlib.sha256).hexdigest()[:40]


class Registry:
    """Sessions by key. `secret` signs the keys."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._sessions: dict[str, Session] = {}
        self._offered: deque[Session] = deque()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._sessions)

    def key_of(self, sample_id: str) -> str:
        """The key of a sample's session."""
        return key_of(self._secret, sample_id)

    async def open(self, session: Session, offered: bool) -> None:
        """Let a session be found; `offered`: by whoever asks for one, not only by who has its key."""
        async with self._changed:
            self._ended.pop(session.key, None)  # it was handed back, and has come again
            self._sessions[session.key] = session
            if offered:
                self._offered.append(session)
            self._changed.notify_all()

    def close(self, session: Session) -> None:
        """It has ended."""
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
            self._ended[session.key] = None
            while len(self._ended) > ENDED_MAX:
                self._ended.popitem(last=False)
        if session in self._offered:
            self._offered.remove(session)

    def check(self, key: str) -> None:
        """Raises `ApiError` unless `key` is that of a session, wherever that may be."""
        if not is_key(self._secret, key):
            raise ApiError(401, "The API key is that of no session of this run.", code="invalid_api_key")

    async def find(self, key: str, wait_s: float) -> Session:
        """The session of a key. One that was here before a restart comes back soon: it is waited for.

        Raises `ApiError`: no such key, the session has ended, or has not come within `wait_s`.
        """
        self.check(key)
        try:
            async with asyncio.timeout(wait_s), self._changed:
                while (session := self._sessions.get(key)) is None:
                    if key in self._ended:
                        raise ApiError(409, "The session has ended.", code="session_ended")
                    await self._changed.wait()
                return session
        except TimeoutError:
            raise too_busy("The session is not here now; it comes back, or it has ended.", 2.0) from None

    async def take(self, wait_s: float) -> Session:
        """A session that nobody has yet. Raises `ApiError` if there is none within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s), self._changed:
                while not self._offered:
                    await self._changed.wait()
                return self._offered.popleft()
        except TimeoutError:
            raise too_busy("There is no task now: all are taken, or the run is busy training.", 2.0) from None

    def give_back(self, session: Session) -> None:
        """Offer a session again that was taken in vain."""
        if session.key in self._sessions:
            self._offered.appendleft(session)
