"""A server with random weights in this process, to measure the time that HTTP adds: all of `shardwise serve` except its files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.data.tokenizer import ByteTokenizer
from shardwise.measure.serve_load import measure_load
from shardwise.run import UserError
from shardwise.run.lengths import Lengths
from shardwise.run.load import draw_load
from shardwise.run.sections.serve import ServeConfig
from shardwise.schedules.serving.figures import Limits as LoadLimits
from shardwise.serve.engine import Engine
from shardwise.serve.event_loop import run_in_loop

SECONDS = 60.0
"""Seconds allowed for a server to start, and to stop."""


class Numbers(ByteTokenizer):
    """A tokenizer for any vocabulary: the text of a token is its number."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def decode(self, ids: Iterable[int]) -> str:
        """The numbers, each preceded by a blank."""
        return "".join(f" {each}" for each in ids)

    def piece(self, token: int, first: bool = False) -> bytes:
        """The bytes of one token."""
        return b" %d" % token


async def serve_engine(engine: Engine, port: int, ready: Callable[[str, Any], None]) -> bool:
    """Serve at a local port until stopped; `ready` gets the address and the `Stop` object that ends the server."""
    from shardwise.serve.server.address import address_of, open_socket
    from shardwise.serve.server.listen import Stop, serve
    from shardwise.serve.server.model import Model

    listener, stop = open_socket("127.0.0.1", port), Stop()
    model = Model("random", Numbers(engine.vocab))
    return bool(await serve(engine, model, listener, stop, None, (), lambda _: ready(address_of(listener), stop)))


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """The address of a server that runs in a thread while the block runs."""
    listening, found = threading.Event(), list[Any]()

    def ready(address: str, stop: Any) -> None:
        found.extend((address, stop, asyncio.get_running_loop()))
        listening.set()

    thread = threading.Thread(target=lambda: run_in_loop(serve_engine(engine, 0, ready)), daemon=True)
    thread.start()
    if not listening.wait(SECONDS):
        raise UserError("the server did not begin to listen")
    address, stop, loop = found
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.ask)
        thread.join(SECONDS)


def arrival_seconds(engine: Engine) -> float:
    """Extra time to first token of a request over HTTP, compared with the engine called in its own process."""
    from shardwise.serve.load.client import Address
    from shardwise.serve.load.run import Load, run_load, summary

    short, few = Lengths(8, 8), Lengths(2, 2)
    settings = ServeConfig(concurrency=1, requests=40)
    alone = measure_load(engine, settings, draw_load(40, 0.0, short, few))
    with served(engine) as address:
        load = Load(requests=40, concurrency=1, input=short, output=few, warmup=4)
        found = summary(run_in_loop(run_load(Address.of(address), load)), LoadLimits()).as_dict()
    return max(0.0, (found["ttft_ms"]["p50"] - alone.figures["ttft_ms"]["p50"]) / 1e3)
