"""An address to listen at, and a server that says when it does."""

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
    """Keeps to limits, says nothing but when it listens, and leaves signals to others: uvicorn would raise them again at its end,
    and so not end well. `last_seconds`: for clients to read the last of their answers."""

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
    """The address to listen at; port 0 is any that is free. Nobody can connect before the server listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small packets at once only for sockets that say they are TCP's.
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
    """The address to give to clients."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
