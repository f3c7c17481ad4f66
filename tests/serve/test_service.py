"""The service: every request gets its outputs and nobody else's, leaving aborts, failing is told, draining ends."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngine
from patience import HANG_SECONDS

from shardwise.run import UserError
from shardwise.serve.request import Request
from shardwise.serve.service import Draining, EngineFailed, QueueFull, Service


def with_service(engine: FakeEngine, work: Callable[[Service], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run a test with a service, which must leave nothing in the engine."""

    async def body() -> None:
        service = Service(engine, **settings)
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await work(service)
        finally:
            await service.close()
        assert not service._replies
        assert service.waiting == 0

    asyncio.run(body())
    if engine.fails_at < 0:
        while not engine.idle:
            engine.step()
        assert engine.stats().pages_used == engine.stats().running == engine.stats().waiting == 0


async def tokens_of(service: Service, *requests: Request) -> dict[tuple[str, int], list[int]]:
    made: dict[tuple[str, int], list[int]] = defaultdict(list)
    async for output in service.generate(*requests):
        made[output.request, output.index] += output.tokens
    return made


def alone(request: Request) -> dict[tuple[str, int], list[int]]:
    """What an engine says to one request."""
    engine, made = FakeEngine(), defaultdict(list)
    engine.add(request)
    while not engine.idle:
        for output in engine.step():
            made[output.request, output.index] += output.tokens
    return made


def request(name: str, length: int = 5, **settings: Any) -> Request:
    return Request(name, tuple(ord(letter) for letter in name), length, **settings)


def test_many_requests_at_once_each_get_their_own() -> None:
    asked = [request(f"r{number}", 1 + number % 9, n=1 + number % 3) for number in range(100)]

    async def work(service: Service) -> None:
        answers = await asyncio.gather(*(tokens_of(service, each) for each in asked))
        for each, answer in zip(asked, answers, strict=True):
            assert answer == alone(each)

    with_service(FakeEngine(max_sequences=7), work)


def test_several_requests_in_one_iteration() -> None:
    asked = [request("one", 3), request("two", 7, n=2)]

    async def work(service: Service) -> None:
        assert await tokens_of(service, *asked) == alone(asked[0]) | alone(asked[1])

    with_service(FakeEngine(), work)


def test_leaving_early_aborts() -> None:
    engine = FakeEngine(max_tokens=10**9, delay=0.001)

    async def leave(service: Service, number: int) -> None:
        async with aclosing(service.generate(request(f"r{number}", 10**8))) as outputs:
            async for _ in outputs:
                break

    async def cancelled(service: Service, number: int) -> None:
        task = asyncio.create_task(tokens_of(service, request(f"c{number}", 10**8)))
        await tokens_of(service, request(f"between{number}", 1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def work(service: Service) -> None:
        await asyncio.gather(*(leave(service, n) for n in range(20)), *(cancelled(service, n) for n in range(20)))

    with_service(engine, work)
    assert engine.aborted == 40


def test_a_stop_string_ends_one_answer_and_not_the_others() -> None:
    engine = FakeEngine(max_tokens=10**9)

    async def work(service: Service) -> None:
        seen: dict[int, int] = defaultdict(int)
        async for output in service.generate(request("r", 10**8, n=3)):
            seen[output.index] += 1
            if seen[output.index] >= 4 + output.index:
                service.finish("r", output.index)
        assert seen.keys() == {0, 1, 2}

    with_service(engine, work)
    assert engine.finished == 3
    assert engine.aborted == 0


def test_what_the_engine_refuses_is_raised_where_it_was_asked() -> None:
    async def work(service: Service) -> None:
        with pytest.raises(UserError, match="more than 100"):
            await tokens_of(service, request("fine", 50), request("long", 200))
        assert await tokens_of(service, request("next", 3)) == alone(request("next", 3))

    with_service(FakeEngine(max_tokens=100), work)


def test_a_failing_engine_tells_everybody(capfd: pytest.CaptureFixture[str]) -> None:
    async def work(service: Service) -> None:
        waiting = [asyncio.create_task(tokens_of(service, request(f"r{n}", 50))) for n in range(5)]
        for failed in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(failed, EngineFailed)
        assert not service.healthy
        with pytest.raises(EngineFailed):
            await tokens_of(service, request("later"))

    with_service(FakeEngine(fails_at=9), work)
    assert "told to fail" in capfd.readouterr().err


def test_a_full_queue_says_when_to_come_again() -> None:
    async def work(service: Service) -> None:
        waiting = [asyncio.create_task(tokens_of(service, request(f"r{n}", 3))) for n in range(8)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as full:
            await tokens_of(service, request("one too many"))
        assert 1 <= full.value.seconds <= 60
        await asyncio.gather(*waiting)
        assert await tokens_of(service, request("now")) == alone(request("now"))

    with_service(FakeEngine(max_sequences=1, delay=0.001), work, max_waiting=8)


@pytest.mark.parametrize("length", [5, 10**8])
def test_draining_waits_for_what_runs_and_takes_nothing_new(length: int) -> None:
    engine = FakeEngine(max_tokens=10**9, delay=0.001)

    async def work(service: Service) -> None:
        running = asyncio.create_task(tokens_of(service, request("running", length)))
        await tokens_of(service, request("before", 1))
        drained = asyncio.create_task(service.drain(10 if length == 5 else 0.01))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await tokens_of(service, request("late"))
        assert not service.healthy
        assert await drained is (length == 5)
        if length == 5:
            assert await running == alone(request("running", 5))
        else:
            with pytest.raises(Draining):
                await running

    with_service(engine, work)


@pytest.mark.parametrize("seed", range(3))
def test_random_comings_and_goings_leave_nothing(seed: int) -> None:
    draw = random.Random(seed)
    engine = FakeEngine(max_sequences=5, pages=40, max_tokens=600)

    async def one(service: Service, number: int) -> None:
        await asyncio.sleep(draw.random() * 0.05)
        asked = request(f"r{number}", draw.randrange(1, 60), n=draw.randrange(1, 4))
        expected, kind = alone(replace(asked)), draw.choice(["read", "leave", "stop"])
        seen: dict[tuple[str, int], list[int]] = defaultdict(list)
        async with aclosing(service.generate(asked)) as outputs:
            async for output in outputs:
                seen[output.request, output.index] += output.tokens
                if kind == "leave" and draw.random() < 0.1:
                    return
                if kind == "stop" and draw.random() < 0.1:
                    service.finish(asked.id, output.index)
        for key, tokens in seen.items():
            assert tokens == expected[key][: len(tokens)]
            assert kind != "read" or tokens == expected[key]

    async def work(service: Service) -> None:
        await asyncio.gather(*(one(service, number) for number in range(150)))

    with_service(engine, work)
