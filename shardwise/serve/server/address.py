"""An address to listen at, and a server that reports when it is listening."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from shardwise.run import Problem, UserError
from shardwise.serve.server.guard import guarded
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
