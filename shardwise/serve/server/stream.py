"""Responses to a client that may disconnect: work that is then cancelled, and answers sent as they arrive (server-sent events).

A stream's headers wait for its first event, so that a mistake in a request yields an error status and not a broken stream. A later
error is sent as an event, which OpenAI's client raises.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardwise.serve.server.errors import ApiError, api_error

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx would buffer the events
]
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client has disconnected."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine. If the client disconnects, the work is cancelled and `ClientGone` is raised."""
    job = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((job, watch), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientGone
        return job.result()
    finally:
        watch.cancel()
        job.cancel()
        await asyncio.wait((job, watch))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def response_of(error: ApiError) -> Response:
    """An error as a response. It closes the connection if the client may still be sending."""
    closes = {"connection": "close"} if error.status in (408, 413) else {}
    return Response(error.body, error.status, {**error.headers, **closes})


def for_client(error: Exception) -> ApiError:
    """The client's error for any exception. The traceback of a bug of the server is printed."""
    known = api_error(error)
    if known is None:
        traceback.print_exception(error)
        known = ApiError(500, "the server made a mistake; its log says more", code="internal_error")
    return known


class EventStream:
    """The events of an answer, each sent when it arrives."""

    begun = False
    """Whether the status was sent."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events = events

    async def send(self, send: Send) -> None:
        """Send all events; raises errors that occur before the first."""
        async with aclosing(self._events) as events:
            first = await anext(events)
            self.begun = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                event = b"data: " + for_client(error).body + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})


class Answering(Response):
    """A coroutine whose result is sent as the response; it is cancelled when the client disconnects."""

    def __init__(self, work: Coroutine[Any, Any, Response | EventStream]) -> None:
        self._work = work
        self._result: Response | EventStream | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the coroutine, then send its result; raises `ClientGone` if not even a status was sent."""
        try:
            await unless_gone(receive, self._answer(scope, receive, send))
        except ClientGone:
            if not getattr(self._result, "begun", False):
                raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._result = await self._work
        if isinstance(self._result, EventStream):
            await self._result.send(send)
        else:
            await self._result(scope, receive, send)
