"""What a client is told when something is wrong: OpenAI's JSON, whatever it was and whoever noticed."""

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
    """An answer that is an error. `param` names the field that is wrong, `code` the mistake."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> bytes:
        """The JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    @property
    def headers(self) -> dict[str, str]:
        """When to come again, and how to be let in."""
        found = {"content-type": "application/json"}
        if self.retry_after:
            found["retry-after"] = str(math.ceil(self.retry_after))
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def api_error(error: Exception) -> ApiError | None:
    """The error for a client of what the service or the engine raised; None for a mistake of our own."""
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
