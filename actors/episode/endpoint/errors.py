"""What a request can be refused for, as OpenAI's clients read it."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError


class ApiError(Exception):
    """An answer `status` with an error body; `retry_after_s` goes into the header that clients honour."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's name of the class of error."""
        names = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return names.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that its sender must mend."""
    return ApiError(400, message, param=param, code=code)


def too_busy(message: str, retry_after_s: float = 1.0) -> ApiError:
    """A request that will do later."""
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, with its place."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-")) or None
    said = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return bad(f"{where or 'the body'}: it must be {said}" if first["type"] != "value_error" else said, where)
