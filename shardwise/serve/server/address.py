"""An address to listen at, and a server that reports when it is listening and keeps connections within limits.

For these it adds what uvicorn's HTTP protocol lacks: uvicorn waits forever for headers, accepts them at any length, keeps a
connection whose client never reads, and answers requests that are not HTTP in plain text. Each connection has one deadline at a
time: for the headers of a request, for the next request, or for a client to read on. The application, which reads the body, has
its own deadline for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from shardwise.run import Problem, UserError
from shardwise.serve.server.errors import ApiError
from shardwise.serve.server.limits import Limits


class QuietServer(uvicorn.Server):
    """A server within limits that reports only that it is listening. It leaves signals to others: uvicorn would raise them again
    when it ends, and so not exit cleanly. `last_seconds`: time for clients to read the end of their answers."""

    def __init__(self, app: ASGIApp, limits: Limits, last_seconds: float, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded(limits),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(limits.idle_seconds),
                timeout_graceful_shutdown=int(last_seconds),
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def open_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 is any free port. Nobody can connect before the server listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that are declared as TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return listener
    except (OSError, OverflowError) as e:
        listener.close()
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise UserError(Problem(f"cannot listen there: {reason}", where=f"{host}:{port}")) from None


def address_of(listener: socket.socket) -> str:
    """The URL for clients."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def guarded(limits: Limits) -> type[HttpToolsProtocol]:
    """The protocol class with these limits."""

    class Guarded(HttpToolsProtocol):
        _head_deadline: asyncio.TimerHandle | None = None
        _read_deadline: asyncio.TimerHandle | None = None
        _head_size = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self._refuse(
                    ApiError(503, "there are too many connections", code="too_many_connections", retry_after=1)
                )
            else:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_deadline = _cancelled(self._head_deadline)
            self._read_deadline = _cancelled(self._read_deadline)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._head_deadline is None and self._answered:
                self._expect_head()
            self._head_size += len(data)
            super().data_received(data)
            if self._head_deadline is not None and self._head_size > limits.head_bytes:
                self._refuse(
                    ApiError(431, f"the headers are longer than {limits.head_bytes} bytes", code="head_too_long")
                )

        def on_headers_complete(self) -> None:
            self._head_deadline = _cancelled(self._head_deadline)
            super().on_headers_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._read_deadline = self.loop.call_later(limits.stalled_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._read_deadline = _cancelled(self._read_deadline)

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, "this is not an HTTP request", code="invalid_http"))

        @property
        def _answered(self) -> bool:
            """Whether no request is being answered, so that the next bytes begin a new one."""
            return self.cycle is None or self.cycle.response_complete

        def _expect_head(self) -> None:
            self._head_size = 0
            self._head_deadline = self.loop.call_later(limits.head_seconds, self._head_is_late)

        def _head_is_late(self) -> None:
            self._head_deadline = None
            if self._head_size:
                late = f"the headers did not arrive within {limits.head_seconds:g} s"
                self._refuse(ApiError(408, late, code="timeout"))
            else:
                self.transport.close()

        def _refuse(self, error: ApiError) -> None:
            """Answer instead of the application, and close the connection. If another answer has started, only close it."""
            self._head_deadline = _cancelled(self._head_deadline)
            if self.transport.is_closing():
                return
            if self._answered or not self.cycle.response_started:
                headers = {**error.headers, "content-length": str(len(error.body)), "connection": "close"}
                lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
                self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + error.body)
            self.transport.close()

    return Guarded


def _cancelled(timer: asyncio.TimerHandle | None) -> Any:
    if timer is not None:
        timer.cancel()
