"""Many short requests, a third of whose clients go away in the middle: every page comes back, and memory stays as it was."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_of, expected
from fake_engine import FakeEngine
from running import Running, model_of, running

from shardwise.run.sections.serve import ServeConfig
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
    address, numbers, vocab = Address.of(server.url), iter(range(count)), server.context.service.vocab
    answered = left = 0

    async def client(draw: random.Random) -> None:
        nonlocal answered, left
        connection = await Connection.to(address)
        for number in numbers:
            body: dict[str, Any] = {
                "prompt": [draw.randrange(vocab) for _ in range(draw.randrange(1, 40))],
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


def run(engine: Any, count: int, seed: int) -> None:
    with running(engine, model_of(ends=frozenset([5])), Limits(waiting=64)) as server:
        asyncio.run(soak(server, count // 5, seed))
        server.idle()
        before = resident()
        answered, left = asyncio.run(soak(server, count, seed + 1))
        server.idle()
        assert answered + left == count
        assert answered > count / 2
        assert left > count / 20
        assert resident() - before < GROWTH
        assert not server.context.service._replies


def fake() -> FakeEngine:
    return FakeEngine(max_sequences=16, pages=200, max_tokens=256, delay=0.001)


def real() -> Any:
    settings = ServeConfig(max_sequences=16, max_step_tokens=64, page_tokens=4)
    return engine_of("llama", settings, 120, torch.float32)


@pytest.mark.drawn(group="soaks")
def test_a_thousand_requests(request: pytest.FixtureRequest) -> None:
    engine = fake()
    run(engine, 1_000, request.config.option.seed)
    assert engine.aborted  # how many are still running when their client leaves depends on the machine


@pytest.mark.drawn(group="soaks")
def test_a_hundred_requests_of_a_model(request: pytest.FixtureRequest) -> None:
    run(real(), 100, request.config.option.seed)


@pytest.mark.large("what a server loses with each of 20,000 requests, which a thousand do not show")
@pytest.mark.parametrize("make", [fake, real])
def test_twenty_thousand_requests(make: Callable[[], Any], request: pytest.FixtureRequest) -> None:
    run(make(), 20_000, request.config.option.seed)


def test_answers_are_the_model_s(request: pytest.FixtureRequest) -> None:
    """Greedy ones over HTTP, many at a time, beside others that are left."""
    draw = random.Random(request.config.option.seed)
    settings = ServeConfig(max_sequences=6, max_step_tokens=24, page_tokens=4)
    prompts = [[draw.randrange(6, 40) for _ in range(draw.randrange(1, 20))] for _ in range(12)]
    with running(engine_of("llama", settings, 40), model_of(ends=frozenset([39]))) as server:
        address = Address.of(server.url)

        async def ask(prompt: list[int], seconds: float = 30.0) -> dict[str, Any]:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True}
            connection = await Connection.to(address)
            answer = await connection.ask(address.request("POST", "/completions", json.dumps(body).encode()), seconds)
            assert seconds < 1 or not answer.error
            return json.loads(connection.body) if not answer.error else {}

        async def all_at_once() -> list[dict[str, Any]]:
            leaving = [ask(prompt[::-1], draw.random() * 0.05) for prompt in prompts]
            return (await asyncio.gather(*(ask(prompt) for prompt in prompts), *leaving))[: len(prompts)]

        for prompt, answer in zip(prompts, asyncio.run(all_at_once()), strict=True):
            tokens, logprobs = expected("llama", tuple(prompt), 8)
            assert answer["choices"][0]["text"] == bytes(tokens).decode()
            assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-9)
        server.idle()
