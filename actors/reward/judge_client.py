"""Asks a judge over HTTP: bounded in time, retried where that can help, within the worker's limits."""

import json
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actors.reward.throttle import NoRoom, Throttle
from schemas.errors import UserError

if TYPE_CHECKING:
    from actors.reward.verifiers.judge import Options

REPLY_BYTES_MAX = 4 << 20
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)


class JudgeFailed(Exception):
    """There is no score. The text says why, of the last attempt."""


@dataclass(frozen=True, slots=True)
class Said:
    """A reply, how many requests it took, and what they cost."""

    text: str
    calls: int
    prompt_tokens: int
    completion_tokens: int


class _Again(Exception):
    """This attempt failed, and another one may not; not before `after_s`, if the server says so."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class JudgeClient:
    """One process's connection to the endpoint. Raises `UserError` if httpx is not installed."""

    def __init__(self, options: "Options", key: str | None, throttle: Throttle) -> None:
        try:
            import httpx
        except ImportError as error:
            raise UserError(
                "The reward function 'judge' needs the package httpx, which is not installed.",
                "Run: pip install 'rollstream[judge]'.",
            ) from error
        if key and not (key.isascii() and key.isprintable()):  # the client's own error would tell it
            raise UserError("The judge's key holds characters that no key has.", "Set its variable again.")
        self._httpx = httpx
        self._key = key or ""
        self._options = options
        self._throttle = throttle
        self._url = options.url.rstrip("/") + "/chat/completions"
        self._client = httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=False)
        weakref.finalize(self, self._client.close)

    def ask(self, body: Mapping[str, Any], budget_s: float, read: Callable[[str], float | None]) -> tuple[Said, float]:
        """A reply that `read` finds a score in, and the score, within `budget_s`. Raises `JudgeFailed`."""
        until_s = time.monotonic() + budget_s
        calls, prompt_tokens, completion_tokens = 0, 0, 0
        why = ""
        for attempt in range(self._options.retries + 1):
            try:
                with self._throttle.place(until_s):
                    self._throttle.start(until_s)
                    calls += 1
                    text, usage = self._once(body, until_s)
                prompt_tokens += usage[0]
                completion_tokens += usage[1]
                score = read(text)
                if score is None:
                    raise _Again(f"its reply has no score: {text[:80]!r}")
                return Said(text, calls, prompt_tokens, completion_tokens), score
            except NoRoom as error:
                raise JudgeFailed(f"{error}{f', after: {why}' if why else ''}") from None
            except _Again as error:
                why = self._without_key(str(error))
                wait_s = max(error.after_s, self._options.backoff_s * 2**attempt)
                if error.after_s:
                    self._throttle.hold(min(error.after_s, until_s - time.monotonic()))
                if attempt == self._options.retries or time.monotonic() + wait_s >= until_s:
                    break
                time.sleep(wait_s)
        raise JudgeFailed(f"no score after {calls} requests, the last: {why}")

    def _once(self, body: Mapping[str, Any], until_s: float) -> tuple[str, tuple[int, int]]:
        """The text of one reply, and its tokens of prompt and completion."""
        httpx = self._httpx
        end_s = min(until_s, time.monotonic() + self._options.request_timeout_s)
        left_s = max(0.01, end_s - time.monotonic())
        try:
            with self._client.stream("POST", self._url, json=body, timeout=left_s) as answer:
                raw = b""
                for chunk in answer.iter_bytes():
                    raw += chunk
                    if len(raw) > REPLY_BYTES_MAX:
                        raise _Again(f"its reply is longer than {REPLY_BYTES_MAX} bytes")
                    if time.monotonic() > end_s:  # the client's own timeouts are of one read each
                        raise _Again("it took too long")
        except httpx.TimeoutException as error:
            raise _Again(f"it took too long ({type(error).__name__})") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        if answer.status_code != 200:
            why = f"HTTP {answer.status_code} {raw[:120].decode(errors='replace')!r}"
            if answer.status_code in RETRIED:
                raise _Again(why, _seconds(answer.headers.get("retry-after", "")))
            raise JudgeFailed(self._without_key(why))
        return _read(raw)

    def _without_key(self, text: str) -> str:
        """Servers repeat what they were sent."""
        return text.replace(self._key, "***") if self._key else text


def _read(raw: bytes) -> tuple[str, tuple[int, int]]:
    try:
        reply = json.loads(raw)
        text = reply["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError("its content is no text")
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise _Again(f"no chat completion ({type(error).__name__}: {error}): {raw[:80]!r}") from None
    usage = reply.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return text, (_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 40 else 0


def _seconds(header: str) -> float:
    """`Retry-After` in seconds; a date, or nonsense, is left to the backoff."""
    try:
        seconds = float(header)
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < 86_400 else 0.0
