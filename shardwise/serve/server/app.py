"""The HTTP application: routes, authentication, reading of bodies, and OpenAI's form for every error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise.serve.server.chat import chat_completions
from shardwise.serve.server.completions import completions
from shardwise.serve.server.context import Context
from shardwise.serve.server.errors import ApiError
from shardwise.serve.server.fields import Fields, parse
from shardwise.serve.server.limits import Limits
from shardwise.serve.server.metrics import CONTENT_TYPE
from shardwise.serve.server.stream import Answering, ClientGone, EventStream, for_client, response_of

Endpoint = Callable[[Context, Fields, str], Coroutine[Any, Any, Response | EventStream]]
LOCAL = ("localhost", "127.0.0.1", "::1")
GONE = 499
"""The status that our metrics count for a request whose client disconnected; it is never sent."""


def make_app(context: Context) -> ASGIApp:
    """The application of a server."""

    async def models(request: Request) -> Response:
        _let_in(context, request)
        name = request.path_params.get("name")
        card = {
            "id": context.model.name,
            "object": "model",
            "created": context.model.created,
            "owned_by": "shardwise",
            "max_model_len": context.service.max_tokens,
            "vocab_size": context.service.vocab,
        }
        if name is None:
            return _json({"object": "list", "data": [card]})
        if name != context.model.name:
            raise ApiError(404, f"The model '{name[:200]}' does not exist", "model", "model_not_found")
        return _json(card)

    async def health(request: Request) -> Response:
        if context.service.error is not None:
            raise ApiError(503, "the engine has failed", code="engine_failed")
        if context.service.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return _json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(context.metrics.text(context.service), media_type=CONTENT_TYPE)

    routes = [
        Route("/v1/completions", _endpoint(context, completions), methods=["POST"]),
        Route("/v1/chat/completions", _endpoint(context, chat_completions), methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", models, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    known = {route.path for route in routes}
    handlers = {HTTPException: _http_error, ClientGone: _nobody, ApiError: _error, Exception: _error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False

    async def counted_app(scope: Scope, receive: Receive, send: Send) -> None:
        """Counts responses by path and status."""
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            # Starlette answers unexpected errors and re-raises them for the server to log; `for_client` has done that.
            with suppress(Exception):
                await app(scope, receive, counted)
        finally:
            path = scope.get("path", "")
            context.metrics.responses[path if path in known else "other", status] += 1

    return counted_app


def _endpoint(context: Context, function: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        user = _let_in(context, request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            # Browsers let pages of other sites send some other content types without a CORS preflight.
            raise ApiError(
                415, "the body must be JSON: send 'Content-Type: application/json'", code="unsupported_media_type"
            )
        fields = Fields(parse(await _read_body(request, context.limits)))
        context.service.check()
        return Answering(function(context, fields, user))

    return answer


def _let_in(context: Context, request: Request) -> str:
    """The user, by the API key; raises `ApiError` if access is denied."""
    origin = request.headers.get("origin")
    if origin and not context.keys and not _is_local(origin):
        # Without a key, any page opened in a browser on this machine could use the server (DNS rebinding).
        raise ApiError(403, "pages of other sites are not let in without an API key", code="foreign_origin")
    return context.user_of(request.headers.get("authorization", ""))


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in LOCAL
    except ValueError:  # not a URL
        return False


async def _read_body(request: Request, limits: Limits) -> bytes:
    """The body, within the limits. A body that is too long is read on for a while and discarded: a client that is cut off while it
    sends does not see the answer."""
    length = request.headers.get("content-length", "")
    expected = int(length) if length.isdigit() else 0
    too_long = ApiError(413, f"the body is longer than {limits.body_bytes} bytes", code="body_too_long")
    if expected > 4 * limits.body_bytes or (expected > limits.body_bytes and "expect" in request.headers):
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > 4 * limits.body_bytes:
                    raise too_long
                if size <= limits.body_bytes:
                    parts.append(part)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_seconds:g} s", code="timeout") from None
    if size > limits.body_bytes:
        raise too_long
    return b"".join(parts)


def _json(content: Any) -> Response:
    return Response(json.dumps(content), media_type="application/json")


async def _error(request: Request, error: Exception) -> Response:
    return response_of(for_client(error))


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of Starlette: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    message = f"there is nothing at {path}"
    if error.status_code == 405:
        message = f"{path} does not take {request.method[:20]}"
    found = ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else "method_not_allowed")
    response = response_of(found)
    response.headers.update(error.headers or {})
    return response
