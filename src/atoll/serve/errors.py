"""Errors as OpenAI's API words them: {"error": {"message", "type", "param", "code"}} under an HTTP status."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one line for the client.
        param: the field at fault, where there is one.
        code: a word that programs may test.
        retry_after: seconds after which asking again makes sense.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, " ".join(message.split()), param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        return {"error": {"message": self.message, "type": kind(self.status), "param": self.param, "code": self.code}}


def kind(status: int) -> str:
    """OpenAI's name for the class of errors that `status` belongs to."""
    named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, message, param, code)


def too_long(asked: int, limit: int, param: str) -> ApiError:
    """400 with the code that clients test to shorten a conversation."""
    count = asked if asked < 10**12 else "more than 10^12"
    message = f"This model's maximum context length is {limit} tokens, and {count} are asked for; shorten {param} or lower max_tokens"
    return ApiError(400, message, param, "context_length_exceeded")
