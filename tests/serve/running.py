"""A server with a fake engine in a thread of this process, and what is left in it when its clients are done."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from fake_engine import FakeEngine
from patience import HANG_SECONDS

from shardwise.data.tokenizer import ByteTokenizer
from shardwise.serve.server.address import address_of, open_socket
from shardwise.serve.server.context import Context
from shardwise.serve.server.limits import Limits
from shardwise.serve.server.listen import Stop, serve
from shardwise.serve.server.model import Model


@dataclass
class Running:
    """A server that runs."""

    url: str
    engine: Any
    context: Context
    loop: asyncio.AbstractEventLoop
    stop: Stop
    thread: threading.Thread
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def connect(self) -> socket.socket:
        """A connection to it."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_SECONDS)

    def tell_to_stop(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.ask)

    def idle(self) -> None:
        """Wait until the engine has nothing left to do and nothing is left in it; what stays in it is a hang."""

        async def wait() -> None:
            async with asyncio.timeout(HANG_SECONDS):
                # Aborts travel to the engine's thread; its next figures come after them. What a client sent before it went away may
                # arrive after all else has ended, so everything is looked at in one moment.
                while any(left()) or not self.engine.idle:
                    await asyncio.sleep(0.001)

        def left() -> tuple[int, ...]:
            service, stats = self.context.service, self.context.service.stats
            return stats.running, stats.waiting, stats.pages_used, service.waiting, service.unfinished

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result()


def model_of(**settings: Any) -> Model:
    """A model of bytes."""
    return Model(**{"name": "tiny", "tokenizer": ByteTokenizer(), "ends": frozenset([256]), **settings})


@contextmanager
def running(
    engine: Any = None,
    model: Model | None = None,
    limits: Limits | None = None,
    keys: tuple[str, ...] = (),
) -> Iterator[Running]:
    """A server, while the block runs."""
    engine = engine or FakeEngine()
    listener = open_socket("127.0.0.1", 0)
    listening = threading.Event()
    found: list[Any] = []

    async def main() -> None:
        stop = Stop()

        def ready(context: Context) -> None:
            found.extend([context, asyncio.get_running_loop(), stop])
            listening.set()

        await serve(engine, model or model_of(), listener, stop, limits, keys, ready)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    url = address_of(listener)
    thread.start()
    assert listening.wait(HANG_SECONDS)
    server = Running(url, engine, *found, thread)
    try:
        yield server
    finally:
        if thread.is_alive():
            server.tell_to_stop()
            server.tell_to_stop()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end, "what was waited for did not happen"
        time.sleep(0.001)


def exchange(server: Running, sent: bytes) -> bytes:
    """Send bytes over a connection of their own, and read whatever comes until it is closed."""
    with server.connect() as connection:
        with suppress(OSError):  # it may have been closed already; what was said before is still there to read
            connection.sendall(sent)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """Whatever comes until the connection is closed."""
    found = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


def post(path: str, body: bytes | dict[str, Any], *headers: str, close: bool = True) -> bytes:
    """The bytes of a request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    lines += ["Connection: close"] if close else []
    return "\r\n".join([*lines, *headers, "", ""]).encode() + content
