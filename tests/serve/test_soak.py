"""Many short requests, a third of whose clients go away in the middle: every page comes back, and memory stays as it was."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest
from serve.fake_engine import FakeEngine
from serve.running import Running, running

from shardwise.serve.load.client import Address, Connection
from shardwise.serve.server.limits import Limits

CLIENTS = 24
GROWTH = 8 * 2**20
"""Bytes that a process may grow by after its first requests; a request that is kept is some 5 KiB."""


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def soak(server: Running, count: int, seed: int) -> tuple[int, int]:
    """Make so many requests; gives how many were answered, and how many were left."""
    address, numbers = Address.of(server.url), iter(range(count))
    answered = left = 0

    async def client(draw: random.Random) -> None:
        nonlocal answered, left
        connection = await Connection.to(address)
        for number in numbers:
            body: dict[str, Any] = {
                "prompt": [draw.randrange(256) for _ in range(draw.randrange(1, 40))],
                "max_tokens": draw.randrange(1, 12),
                "stream": draw.random() < 0.7,
                "n": draw.choice([1, 1, 1, 3]),
                "stop": draw.choice([None, "e", ["ab", "c"]]),
                "logprobs": draw.choice([None, None, 2]),
                "seed": number,
            }
            request = address.request("POST", "/completions", json.dumps(body).encode())
            leaves = draw.random() < 0.33
            answer = await connection.ask(request, draw.random() * 0.01 if leaves else 30.0)
            if answer.error:
                assert leaves, answer.error
                left += 1
            else:
                answered += 1
            if not connection.usable:
                connection.close()
                connection = await Connection.to(address)
        connection.close()

    async with asyncio.timeout(600):
        await asyncio.gather(*(client(random.Random(f"{seed} {number}")) for number in range(CLIENTS)))
    return answered, left


def run(count: int, seed: int) -> None:
    engine = FakeEngine(max_sequences=16, pages=200, max_tokens=256, delay=0.001)
    with running(engine, limits=Limits(waiting=64)) as server:
        asyncio.run(soak(server, 300, seed))
        server.idle()
        before = resident()
        answered, left = asyncio.run(soak(server, count, seed + 1))
        server.idle()
        assert answered + left == count
        assert answered > count / 2
        assert engine.aborted > left / 10
        assert resident() - before < GROWTH
        assert not server.context.service._replies


def test_a_thousand_requests(request: pytest.FixtureRequest) -> None:
    run(1_000, request.config.option.seed)


@pytest.mark.large("what a server loses with each of 20,000 requests, which a thousand do not show")
def test_twenty_thousand_requests(request: pytest.FixtureRequest) -> None:
    run(20_000, request.config.option.seed)
