"""A load on a server: requests at random times (Poisson, `rate` a second), or `concurrency` of them at all times.

The seed determines lengths, times and prompts, so that two servers can get the same load. Send times do not depend on answers;
where this program itself is late, it reports by how much. The records become the figures of a load
(`schedules/serving/figures.py`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.run import UserError
from shardwise.run.lengths import Lengths
from shardwise.run.load import draw_load, prompt_tokens
from shardwise.schedules.serving.figures import Limits, LoadFigures, RequestTimes
from shardwise.serve.load.client import Address, Answer, Connection

SAFE_TOKENS = 256
"""Random tokens are below this if a server does not report its vocabulary size: every vocabulary has at least this many."""


@dataclass(frozen=True)
class Load:
    """The requests to send to a server."""

    requests: int
    rate: float = 0.0
    """Requests a second; 0: `concurrency` is used instead."""
    concurrency: int = 0
    input: Lengths = field(default_factory=lambda: Lengths(128, 128))
    output: Lengths = field(default_factory=lambda: Lengths(128, 128))
    texts: Sequence[str] = ()
    """Prompts; if empty, prompts are random tokens."""
    chat: bool = False
    model: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    ends: bool = False
    """Whether an answer may end before its length, at an end token."""
    warmup: int = 0
    seed: int = 0
    seconds: float = 600.0
    """Time limit of an answer."""


@dataclass(frozen=True)
class Record:
    """One request that was sent."""

    due: float
    """When it was to be sent, in seconds from the start."""
    answer: Answer


@dataclass(frozen=True)
class Progress:
    """The progress of a load."""

    seconds: float
    sent: int
    ended: int
    failed: int
    tokens: int


async def run_load(
    address: Address, load: Load, tell: Callable[[Progress], None] = lambda progress: None
) -> list[Record]:
    """Send all requests and wait for their answers; returns them in the order in which they were due."""
    card = await _first_model(address)
    maker = _Requests(address, load, load.model or card["id"], card.get("vocab_size") or SAFE_TOKENS)
    pool = _Pool(address, load.seconds)
    try:
        for number in range(load.warmup):
            await pool.ask(maker.request(-1 - number))
        return await _all(load, maker, pool, tell)
    finally:
        pool.close()


async def _all(load: Load, maker: _Requests, pool: _Pool, tell: Callable[[Progress], None]) -> list[Record]:
    start = time.perf_counter()
    records: list[Record | None] = [None] * load.requests
    due = [asked.due for asked in maker.asked[: load.requests]] if load.rate else []

    async def one(number: int) -> None:
        moment = due[number] if due else time.perf_counter() - start
        records[number] = Record(moment, await pool.ask(maker.request(number)))

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.5)
            made = [record.answer for record in records if record]
            sent = len(made) + pool.asking
            failed = sum(bool(answer.error) for answer in made)
            tell(Progress(time.perf_counter() - start, sent, len(made), failed, sum(len(a.times) for a in made)))

    watching = asyncio.create_task(watch())
    try:
        if due:
            async with asyncio.TaskGroup() as group:
                for number, moment in enumerate(due):
                    await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
                    group.create_task(one(number))
        else:
            numbers = iter(range(load.requests))

            async def worker() -> None:
                for number in numbers:
                    await one(number)

            await asyncio.gather(*(worker() for _ in range(min(load.concurrency, load.requests))))
    finally:
        watching.cancel()
    return [record for record in records if record]


class _Requests:
    """The bytes of each request, made when it is due: all of them at once might not fit in memory."""

    def __init__(self, address: Address, load: Load, model: str, vocab: int) -> None:
        self._address, self._load, self._model, self._vocab = address, load, model, vocab
        self.asked = draw_load(load.requests + load.warmup, load.rate, load.input, load.output, load.seed)

    def request(self, number: int) -> bytes:
        load = self._load
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": self.asked[number].output,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if load.ends else {"ignore_eos": True}),
            **load.sampling,
        }
        if load.chat:
            body["messages"] = [{"role": "user", "content": self._text(number)}]
        elif load.texts:
            body["prompt"] = self._text(number)
        else:
            body["prompt"] = self._tokens(number)
        path = "/chat/completions" if load.chat else "/completions"
        return self._address.request("POST", path, json.dumps(body).encode())

    def _text(self, number: int) -> str:
        if self._load.texts:
            return self._load.texts[number % len(self._load.texts)]
        return " ".join(map(str, self._tokens(number)))[: self.asked[number].input]

    def _tokens(self, number: int) -> list[int]:
        return prompt_tokens(self._load.seed, number, self.asked[number].input, self._vocab)


class _Pool:
    """Connections that are reused."""

    def __init__(self, address: Address, seconds: float) -> None:
        self._address, self._seconds = address, seconds
        self._free: list[Connection] = []
        self.asking = 0

    async def ask(self, request: bytes) -> Answer:
        sent = time.perf_counter()
        self.asking += 1
        try:
            while self._free:
                connection = self._free.pop()
                if connection.usable:
                    break
            else:
                connection = await Connection.to(self._address)
            answer = await connection.ask(request, self._seconds)
            if connection.usable:
                self._free.append(connection)
        except OSError as e:
            return Answer(sent, ended=time.perf_counter(), error=f"no connection: {e.strerror or e}")
        finally:
            self.asking -= 1
        answer.sent = sent  # a client also waits for the connection to open
        return answer

    def close(self) -> None:
        for connection in self._free:
            connection.close()


async def _first_model(address: Address) -> dict[str, Any]:
    """The server's description of its model."""
    try:
        connection = await Connection.to(address)
        answer = await connection.ask(address.request("GET", "/models"), 30.0)
    except OSError as e:
        raise UserError(f"there is no server at {address.host}:{address.port}: {e.strerror or e}") from None
    connection.close()
    if connection.status == 401:
        wrong = (
            "does not accept the key of --api-key" if address.key else "wants an API key; give it with --api-key KEY"
        )
        raise UserError(f"{address.host}:{address.port} {wrong} ({answer.error})")
    try:
        if answer.error:
            raise ValueError(answer.error)
        return dict(json.loads(connection.body)["data"][0])
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise UserError(f"{address.host}:{address.port} does not list its models as OpenAI's API does: {e}") from None


def made_of(records: Sequence[Record]) -> list[RequestTimes]:
    """The latencies of the requests that were answered."""
    start = min((record.answer.sent - record.due for record in records), default=0.0)
    found = []
    for record in records:
        answer = record.answer
        if answer.error or not answer.times:
            continue
        due, (prompt, output) = start + record.due, answer.tokens
        first, last = answer.times[0], answer.times[-1]
        found.append(
            RequestTimes(
                due=record.due,
                late=(answer.sent - due) * 1e3,
                ttft=(first - due) * 1e3,
                tpot=(last - first) / (output - 1) * 1e3 if output > 1 else None,
                e2e=(last - due) * 1e3,
                input_tokens=prompt,
                output_tokens=output,
                gaps=tuple((b - a) * 1e3 for a, b in zip(answer.times, answer.times[1:], strict=False)),
            )
        )
    return found


def summary(records: Sequence[Record], limits: Limits) -> LoadFigures:
    """The figures of all records."""
    started = min((record.answer.sent for record in records), default=0.0)
    seconds = max((record.answer.ended for record in records), default=0.0) - started
    return LoadFigures(tuple(made_of(records)), len(records), seconds, limits, _errors(records))


def _errors(records: Sequence[Record]) -> dict[str, int]:
    """The errors and their counts, the most common first."""
    texts = [r.answer.error or "an answer without text" for r in records if r.answer.error or not r.answer.times]
    return dict(Counter(texts).most_common(10))
