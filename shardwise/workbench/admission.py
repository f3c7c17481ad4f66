"""Access control: only clients with the address that the command printed are let in. The server listens on this machine alone, and
its address contains a random token. A request without the token, for another host's name (DNS rebinding), from another site's
page, or too large is refused before anything reads it."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_HEADER = b"x-shardwise-token"
MOST_BODY = 64 * 2**10
"""The largest body of a request, in bytes."""
SECURITY = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


def encoded(content: Any) -> bytes:
    """Encode as JSON, which has no NaN or infinity."""
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return encoded({"problems": [{"key": "", "message": "a number of this plan is not finite"}]})


def refusal(status: int, why: str) -> Response:
    """An error response: a status and a sentence."""
    return Response(encoded({"problems": [{"message": why}]}), status, media_type="application/json")


class Admission:
    """Forwards only requests that pass these checks to the application."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = [f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost")]
        self._origins = [b"http://" + host for host in self._hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        reason = self._refusal(scope)
        app = self._app if reason is None else refusal(*reason)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *SECURITY]}
            await send(message)

        await app(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts, origins = headers.get(b"host", []), headers.get(b"origin", [])
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return 403, "this server answers to its own address alone"
        if len(origins) > 1 or (origins and origins[0].lower() not in self._origins):
            return 403, "pages of other sites are not let in"
        if not self._has_token(headers.get(TOKEN_HEADER, []), scope["query_string"]):
            return 403, "the address lacks its token; open the one that the command printed"
        lengths = headers.get(b"content-length", [])
        if len(lengths) > 1 or (lengths and (not lengths[0].isdigit() or int(lengths[0][:20]) > MOST_BODY)):
            return 413, f"a request has up to {MOST_BODY} bytes"
        return None

    def _has_token(self, given: list[bytes], query: bytes) -> bool:
        try:
            asked = parse_qs(query.decode("latin-1"), max_num_fields=16).get("token", [])
        except ValueError:
            return False
        tokens: Iterable[bytes] = given or (each.encode("utf-8", "surrogatepass") for each in asked)
        return any(hmac.compare_digest(each, self._token) for each in tokens)
