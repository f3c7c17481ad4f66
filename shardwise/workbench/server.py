"""A server on this machine, from start to end. It prints its address in one line when it is ready, opens it in a browser unless
told not to, and ends with Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import webbrowser

from starlette.types import ASGIApp

from shardwise.serve.event_loop import run_in_loop
from shardwise.serve.server.address import QuietServer, open_socket
from shardwise.serve.server.limits import Limits
from shardwise.workbench.admission import MOST_BODY, Admission, new_token

HOST = "127.0.0.1"
LIMITS = Limits(body_bytes=MOST_BODY, head_bytes=32 * 2**10, connections=256)


def serve_page(app: ASGIApp, what: str, port: int, opens: bool) -> None:
    """Serve the application on a free or given port of this machine until told to end."""
    listener = open_socket(HOST, port)
    port = listener.getsockname()[1]
    token = new_token()
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
