"""A server from start to end: it listens, reports when it is ready, and once told to end refuses new requests, finishes the
running ones within a time limit, and exits. While it drains it still responds, so that a load balancer sees that it accepts no
more requests."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardwise.serve.server.address import QuietServer
from shardwise.serve.server.app import make_app
from shardwise.serve.server.context import Context
from shardwise.serve.server.limits import Limits
from shardwise.serve.server.model import Model
from shardwise.serve.service import Engine, Service

LAST_SECONDS = 5.0
"""Time for clients to read the end of their answers, after the drain."""


class Stop:
    """Asks a server to end; a second call ends it at once. For the server's own thread; others use `call_soon_threadsafe`."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self.at_once = asyncio.Event()

    def ask(self) -> None:
        """Ask the server to end."""
        (self.at_once if self.wanted.is_set() else self.wanted).set()


async def serve(
    engine: Engine,
    model: Model,
    listener: socket.socket,
    stop: Stop,
    limits: Limits | None = None,
    keys: Sequence[str] = (),
    ready: Callable[[Context], None] = lambda context: None,
) -> BaseException | None:
    """Answer requests at an address until told to end; returns the engine's error if it failed."""
    limits = limits or Limits()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns about every client that disconnects
    service = Service(engine, limits.waiting)
    context = Context(model, service, limits, tuple(keys))
    server = QuietServer(make_app(context), limits, LAST_SECONDS, lambda: ready(context))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await _until(serving, stop.wanted)
        draining = asyncio.create_task(service.drain(limits.drain_seconds))
        await _until(draining, stop.at_once)
        draining.cancel()
        await service.drain(0)
        server.should_exit = True
        await serving
        return service.error
    finally:
        serving.cancel()
        await service.close()


async def _until(task: asyncio.Task[Any], told: asyncio.Event) -> None:
    """Wait until a task is done or the event is set."""
    telling = asyncio.create_task(told.wait())
    await asyncio.wait((task, telling), return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()


def within_files(limits: Limits) -> Limits:
    """The limits, with no more connections than this process may have open files; that number is first raised to its maximum."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    room = limits.connections if most == resource.RLIM_INFINITY else most - 256
    return replace(limits, connections=max(1, min(limits.connections, room)))
