"""A server from its first address to its end: it listens, says when it is ready, and once told to end takes no more requests,
finishes what runs within a limit, and goes. While it drains it still answers, so that a balancer sees that it is not to be asked
any more."""

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
"""For clients to read the last of their answers, after the drain."""


class Stop:
    """Asks a server to end; asked again, it ends at once. For the server's own thread; `call_soon_threadsafe` for others."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self.at_once = asyncio.Event()

    def ask(self) -> None:
        """End."""
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
    """Answer requests at an address until told to end; gives what the engine failed with, if it did."""
    limits = limits or Limits()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each client that goes away
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
    """Wait until a task is done, or this is told."""
    telling = asyncio.create_task(told.wait())
    await asyncio.wait((task, telling), return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()


def within_files(limits: Limits) -> Limits:
    """The limits, with no more connections than this process may have open files, which is raised as far as it goes."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    room = limits.connections if most == resource.RLIM_INFINITY else most - 256
    return replace(limits, connections=max(1, min(limits.connections, room)))
