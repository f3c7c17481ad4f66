"""The application, and a server for it on this machine. Planning runs in this process, one question at a time; slow work runs in
other processes (`aside.py`), so that controls respond at once meanwhile."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import webbrowser
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from threading import Lock
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from shardwise.run import UserError, to_toml
from shardwise.serve.event_loop import run_in_loop
from shardwise.serve.server.address import QuietServer, open_socket
from shardwise.serve.server.limits import Limits
from shardwise.workbench.admission import MOST_BODY, Admission, encoded, refusal
from shardwise.workbench.answer import Planned, answer
from shardwise.workbench.aside import KINDS, Aside
from shardwise.workbench.page import offline_page, watch_page, workbench_page
from shardwise.workbench.question import Base, Keys, base_of, changes_of, problems_of
from shardwise.workbench.watch import Stamp, Watch, stamp_of

REMEMBERED = 256
"""Answers that are cached: a slider moves back as often as forth."""
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HOST = "127.0.0.1"
LIMITS = Limits(body_bytes=MOST_BODY, head_bytes=32 * 2**10, connections=256)


class Workbench:
    """The run that the page began with, and the answers so far."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._last: tuple[str, Planned] | None = None
        self._lock = Lock()

    def planned(self, changes: Keys) -> Planned:
        """The plan with these changes; the last one is kept, because the page requests its timeline next."""
        name, last = json.dumps(changes, sort_keys=True), self._last
        if last is None or last[0] != name:
            last = self._last = (name, answer(self.base, changes))
        return last[1]

    def timeline(self, changes: Keys) -> dict[str, Any]:
        """The drawn timeline of one step of the plan with these changes."""
        with self._lock:
            found = self.planned(changes).timeline()
        return {"remark": found.remark, "body": found.body}

    def answer(self, changes: Keys) -> bytes:
        """The answer as JSON; the mistakes in a question are an answer, too."""
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


def make_app(bench: Workbench | None, watch: Watch | None = None) -> Starlette:
    """The application: a workbench, watched runs, or both. A question may name the watched run that it is about."""
    benches: dict[str, tuple[Stamp | None, Workbench]] = {}
    asides: dict[str, Aside] = {}

    def bench_of(content: Any) -> Workbench:
        name = content.get("run") if isinstance(content, dict) else None
        if watch is None or not isinstance(name, str):
            if bench is None:
                raise UserError("name the run to plan")
            return bench
        file = watch.run_file(name)
        stamp = stamp_of(file)
        if name not in benches or benches[name][0] != stamp:
            benches[name] = stamp, Workbench(base_of(str(file), []))
        return benches[name][1]

    async def page(request: Request) -> Response:
        name = request.query_params.get("run")

        def made(nonce: str) -> str:
            if watch is not None and (bench is None and name is None):
                return watch_page(watch.folder.name, nonce)
            chosen = bench_of({"run": name} if name is not None else {})
            return workbench_page(chosen.base, chosen.answer({}), nonce, name, watched=watch is not None)

        try:
            return await asyncio.to_thread(html_response, made)
        except UserError as e:
            return refusal(404, str(e))

    async def watching(request: Request) -> Response:
        assert watch is not None
        return await asyncio.to_thread(html_response, lambda nonce: watch_page(watch.folder.name, nonce))

    async def plan(content: Any) -> Response:
        chosen, changes = bench_of(content), changes_of(content)
        return Response(await asyncio.to_thread(chosen.answer, changes), media_type="application/json")

    async def timeline(content: Any) -> Response:
        found = await asyncio.to_thread(bench_of(content).timeline, changes_of(content))
        return Response(encoded(found), media_type="application/json")

    async def run_file(content: Any) -> Response:
        return Response(to_toml(bench_of(content).base.planned(changes_of(content)).run), media_type="application/toml")

    async def report(content: Any) -> Response:
        found = await asyncio.to_thread(bench_of(content).planned, changes_of(content))
        return Response(offline_page(found), media_type="application/octet-stream")

    def beside(kind: str) -> Callable[[Any], Awaitable[Response]]:
        async def found(content: Any) -> Response:
            base, changes = bench_of(content).base, changes_of(content)
            if kind not in asides:
                asides[kind] = Aside(kind)
            told = await asides[kind].ask(base.given, changes)
            return Response(encoded(told if told is not None else {"superseded": True}), media_type="application/json")

        return found

    async def follow(content: Any) -> Response:
        assert watch is not None
        found = await asyncio.to_thread(watch.answer, content)
        return Response(await asyncio.to_thread(encoded, found), media_type="application/json")

    routes = [
        Route("/", page, methods=["GET"]),
        Route("/api/plan", asked(plan), methods=["POST"]),
        Route("/api/timeline", asked(timeline), methods=["POST"]),
        *(Route(f"/api/{kind}", asked(beside(kind)), methods=["POST"]) for kind in KINDS),
        Route("/api/run.toml", asked(run_file), methods=["POST"]),
        Route("/api/page.html", asked(report), methods=["POST"]),
    ]
    if watch is not None:
        routes += [Route("/watch", watching, methods=["GET"]), Route("/api/follow", asked(follow), methods=["POST"])]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refused, Exception: _failed})
    app.router.redirect_slashes = False
    return app


def html_response(made: Callable[[str], str]) -> Response:
    """A page that runs only its own scripts: each has the nonce of this response."""
    nonce = secrets.token_urlsafe(16)
    policy = POLICY.format(nonce=nonce)
    return Response(made(nonce), media_type="text/html", headers={"content-security-policy": policy})


def asked(function: Callable[[Any], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that takes a question as JSON; the mistakes in it are the answer."""

    async def endpoint(request: Request) -> Response:
        try:
            return await function(await body_of(request))
        except UserError as e:
            return Response(encoded(problems_of(e)), media_type="application/json")

    return endpoint


async def body_of(request: Request) -> Any:
    """The JSON of a request's body."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be JSON")
    parts, size = [], 0
    try:
        async with asyncio.timeout(20):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BODY:
                    raise HTTPException(413, f"a request has up to {MOST_BODY} bytes")
                parts.append(part)
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    except (TimeoutError, ClientDisconnect):
        raise HTTPException(408, "the body did not arrive") from None


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, "there is nothing here" if error.status_code == 404 else str(error.detail))


async def _failed(request: Request, error: Exception) -> Response:
    return refusal(500, f"the planner failed: {type(error).__name__}")


def serve_page(app: ASGIApp, what: str, port: int, opens: bool) -> None:
    """Serve the application on a free or given port of this machine until Ctrl-C or SIGTERM. It prints its address in one line when
    it is ready, and opens it in a browser if `opens`."""
    listener = open_socket(HOST, port)
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    address = f"http://{HOST}:{port}/?token={token}"

    def ready() -> None:
        print(f"{what} at {address}", flush=True)
        if opens:
            webbrowser.open(address)

    server = QuietServer(Admission(app, token, port), LIMITS, 1.0, ready)

    async def until_signalled() -> None:
        def end() -> None:
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, end)
        await server.serve([listener])

    run_in_loop(until_signalled())
