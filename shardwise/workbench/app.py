"""The application: which path of the address is answered by what. Planning happens in this process, one question at a time; what
takes seconds happens in others (`aside.py`), so that a control is answered at once meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from threading import Lock
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from shardwise.run import UserError, to_toml
from shardwise.workbench.admission import MOST_BODY
from shardwise.workbench.answer import Planned, answer
from shardwise.workbench.page import offline_page, workbench_page
from shardwise.workbench.question import Base, Keys, changes_of

REMEMBERED = 256
"""Answers that are kept: a slider goes back as often as forth."""
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Workbench:
    """The run that the page began with, and the answers given so far."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    def planned(self, changes: Keys) -> Planned:
        """The plan with these changes."""
        return answer(self.base, changes)

    def answer(self, changes: Keys) -> bytes:
        """The answer as JSON; what is wrong with a question is an answer too."""
        name = json.dumps(changes, sort_keys=True)
        with self._lock:
            if name in self._answers:
                self._answers.move_to_end(name)
                return self._answers[name]
            try:
                content = self.planned(changes).as_dict()
            except UserError as e:
                content = problems_of(e)
            self._answers[name] = encoded(content)
            if len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
            return self._answers[name]


def problems_of(error: UserError) -> dict[str, Any]:
    """What is wrong with a question, by key."""
    return {"problems": [{"key": each.key, "message": each.message} for each in error.problems]}


def encoded(content: Any) -> bytes:
    """JSON, which has no numbers that are not finite."""
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return encoded({"problems": [{"key": "", "message": "a number of this plan is not finite"}]})


def make_app(bench: Workbench) -> Starlette:
    """The application of a workbench."""

    async def page(request: Request) -> Response:
        return await asyncio.to_thread(html_response, lambda nonce: workbench_page(bench.base, bench.answer({}), nonce))

    async def plan(changes: Keys) -> Response:
        return Response(await asyncio.to_thread(bench.answer, changes), media_type="application/json")

    async def run_file(changes: Keys) -> Response:
        return Response(to_toml(bench.base.planned(changes).run), media_type="application/toml")

    async def report(changes: Keys) -> Response:
        found = await asyncio.to_thread(bench.planned, changes)
        return Response(offline_page(found), media_type="application/octet-stream")

    routes = [
        Route("/", page, methods=["GET"]),
        Route("/api/plan", asked(plan), methods=["POST"]),
        Route("/api/run.toml", asked(run_file), methods=["POST"]),
        Route("/api/page.html", asked(report), methods=["POST"]),
    ]
    return application(routes)


def application(routes: list[Route]) -> Starlette:
    """Routes, and an answer for whatever goes wrong."""
    app = Starlette(routes=routes, exception_handlers={HTTPException: _nothing_there, Exception: _failed})
    app.router.redirect_slashes = False
    return app


def html_response(made: Callable[[str], str]) -> Response:
    """A page whose scripts are its own: each has the nonce of this answer."""
    import secrets

    nonce = secrets.token_urlsafe(16)
    policy = POLICY.format(nonce=nonce)
    return Response(made(nonce), media_type="text/html", headers={"content-security-policy": policy})


def asked(function: Callable[[Keys], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that takes changed keys as JSON."""

    async def endpoint(request: Request) -> Response:
        content, refused = await body_of(request)
        if refused is not None:
            return refused
        try:
            return await function(changes_of(content))
        except UserError as e:
            return Response(encoded(problems_of(e)), media_type="application/json")

    return endpoint


async def body_of(request: Request) -> tuple[Any, Response | None]:
    """The JSON of a request's body, or the answer that refuses it."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return None, refusal(415, "the body must be JSON")
    parts, size = [], 0
    try:
        async with asyncio.timeout(20):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BODY:
                    return None, refusal(413, f"a request has up to {MOST_BODY} bytes")
                parts.append(part)
        return json.loads(b"".join(parts)), None
    except (ValueError, RecursionError):
        return None, refusal(400, "the body is not JSON")
    except (TimeoutError, ClientDisconnect):
        return None, refusal(408, "the body did not arrive")


def refusal(status: int, why: str) -> Response:
    """A sentence with a status."""
    return Response(encoded({"problems": [{"message": why}]}), status, media_type="application/json")


async def _nothing_there(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, "there is nothing here" if error.status_code == 404 else str(error.detail))


async def _failed(request: Request, error: Exception) -> Response:
    return refusal(500, f"the planner failed: {type(error).__name__}")
