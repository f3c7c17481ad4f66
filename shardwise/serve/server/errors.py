"""Errors for clients, always as OpenAI's JSON, whatever went wrong and wherever it was noticed."""

from __future__ import annotations

import json
import math

from shardwise.run import UserError
from shardwise.serve.service import Draining, EngineFailed, QueueFull

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """An error response. `param` names the field that is wrong, `code` the kind of mistake."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> bytes:
        """The error as JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    @property
    def headers(self) -> dict[str, str]:
        """The headers, with the retry time and the authentication scheme where they apply."""
        found = {"content-type": "application/json"}
        if self.retry_after:
            found["retry-after"] = str(math.ceil(self.retry_after))
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def api_error(error: Exception) -> ApiError | None:
    """The client's error for an exception of the service or the engine; None if it is a bug of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFull):
        return ApiError(429, f"{error}; retry later", code="queue_full", retry_after=error.seconds)
    if isinstance(error, Draining):
        return ApiError(503, str(error), code="shutting_down", retry_after=5)
    if isinstance(error, EngineFailed):
        return ApiError(503, str(error), code="engine_failed")
    return None
