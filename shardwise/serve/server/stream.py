"""Answers to a client that may go away: work that ends when it does, and answers sent as they come (server-sent events).

A stream's headers wait for its first event, so that what is wrong with a request is a status and not a broken stream. What goes
wrong later is an event with the error, which OpenAI's client raises.
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
    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
]
Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody is there to be answered."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What some work results in; it is cancelled as soon as the client goes away, and then `ClientGone` is raised."""
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
    """An error as a response. Its connection ends where the client may still be sending."""
    closes = {"connection": "close"} if error.status in (408, 413) else {}
    return Response(error.body, error.status, {**error.headers, **closes})


def for_client(error: Exception) -> ApiError:
    """What a client is told of any error. One that is a mistake of ours is shown to whoever runs the server."""
    known = api_error(error)
    if known is None:
        traceback.print_exception(error)
        known = ApiError(500, "the server made a mistake; its log says more", code="internal_error")
    return known


class EventStream:
    """Events of an answer, each sent when it comes."""

    begun = False
    """Whether its status was sent."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events = events

    async def send(self, send: Send) -> None:
        """Send them all; raises what goes wrong before the first."""
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
    """Some work whose result is sent as the response; it ends when the client goes away."""

    def __init__(self, work: Coroutine[Any, Any, Response | EventStream]) -> None:
        self._work = work
        self._result: Response | EventStream | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work, then send; raises `ClientGone` where not even a status was sent."""
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
